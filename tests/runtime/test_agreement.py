"""A run compares its sampler with its trainer after each refresh, and does not go on with a wrong one."""

from pathlib import Path

import pytest

from opentinker_core.policies.types import PolicyVersion
from opentinker_core.runtime.session import RunSession, open_session
from opentinker_core.sampling.canary import CanaryError
from tests.runtime.runs import small_config, train, workspace_at


def _stale(session: RunSession, old: PolicyVersion) -> None:
    """From now on the sampler gets `old`, whatever version is said to be published."""
    sampler = session.engine.sampler
    refresh = sampler.refresh
    sampler.refresh = lambda version, uri, digest: refresh(  # type: ignore[method-assign]
        version, old.sampler.uri, old.sampler.digest
    )


def test_every_step_records_how_well_its_version_was_served(tmp_path: Path) -> None:
    session = train(tmp_path, small_config())
    versions = session.workspace.catalog.run_versions(session.run.run_id)
    for version in versions[1:]:
        assert version.metrics["sampler/canary_alarm"] == 0
        assert version.metrics["sampler/canary_mean"] <= version.metrics["sampler/canary_max"] < 1e-4
    for version in versions[3:]:
        assert version.metrics["ratio_ess"] == pytest.approx(1, abs=1e-3)


def test_a_stale_sampler_stops_the_run_at_the_refresh(tmp_path: Path) -> None:
    session = open_session(small_config(), workspace_at(tmp_path))
    _stale(session, session.version)
    published = session.publish(4, session.sft(1, 4))
    with pytest.raises(CanaryError, match=f"disagree about {published.ref}"):
        session.refresh(published)


def test_after_a_resume_it_is_found_before_the_next_update(tmp_path: Path) -> None:
    session = open_session(small_config(), workspace_at(tmp_path))
    first = session.version
    session.publish(4, session.sft(1, 4))
    again = open_session(None, workspace_at(tmp_path), run_id=session.run.run_id)
    _stale(again, first)
    again.refresh(again.version)
    with pytest.raises(CanaryError, match=f"disagree about {again.version.ref}"):
        again.sft(5, 6)


def test_only_every_so_many_refreshes_are_compared_if_that_is_asked_for(tmp_path: Path) -> None:
    session = train(tmp_path, small_config(canary={"every": 2}))
    versions = session.workspace.catalog.run_versions(session.run.run_id)
    compared = ["sampler/canary_mean" in version.metrics for version in versions[1:]]
    assert compared == [True, False, True, False, True]  # what served the step that made the version


def test_a_warning_lets_the_run_go_on_and_no_canary_asks_nothing(tmp_path: Path) -> None:
    session = open_session(small_config(canary={"action": "warn"}), workspace_at(tmp_path / "warned"))
    _stale(session, session.version)
    session.refresh(session.publish(4, session.sft(1, 4)))
    assert session.sft(5, 6)["sampler/canary_alarm"] == 1
    silent = open_session(small_config(canary={"enabled": False}), workspace_at(tmp_path / "silent"))
    _stale(silent, silent.version)
    silent.refresh(silent.publish(4, silent.sft(1, 4)))
    assert not any(name.startswith("sampler/") for name in silent.sft(5, 6))
