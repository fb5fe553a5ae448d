"""Versions in a shared sampler: there for whoever asked for them, and for no longer."""

from dataclasses import replace
from pathlib import Path

import pytest

from opentinker_core.errors import UsageError
from opentinker_core.policies.types import RunStatus
from opentinker_core.runtime.session import RunSession, open_session
from opentinker_core.sampling.protocol import SampleRequest, SamplingParams
from opentinker_core.snapshots.protocol import SnapshotError
from tests.runtime.runs import small_config, workspace_at

CONFIG = small_config(sft=None)


def _serves(session: RunSession, ref: str) -> bool:
    request = SampleRequest((5,), SamplingParams(max_tokens=1), ref, (0,))
    try:
        session.engine.sampler.sample([request])
    except UsageError:
        return False
    return True


def test_a_run_keeps_the_version_it_samples_with_and_no_other(tmp_path: Path) -> None:
    session = open_session(CONFIG, workspace_at(tmp_path))
    first = session.version
    session.refresh(session.publish(1, session.update(1)))
    second = session.version
    assert not _serves(session, first.ref)
    assert _serves(session, second.ref)
    session.evaluate(first.ref)  # comes back for as long as it is needed
    assert not _serves(session, first.ref)
    assert _serves(session, second.ref)
    session.finish(RunStatus.COMPLETED)
    assert not _serves(session, second.ref)


def test_a_version_stays_while_another_run_has_it(tmp_path: Path) -> None:
    session = open_session(CONFIG, workspace_at(tmp_path))
    engine, version = session.engine, session.version
    engine.versions.hold(engine.sampler, version, "another run")
    session.refresh(session.publish(1, session.update(1)))
    assert _serves(session, version.ref)
    engine.versions.let_go(engine.sampler, version.ref, "a third run, which never had it")
    assert _serves(session, version.ref)
    engine.versions.let_go(engine.sampler, version.ref, "another run")
    assert not _serves(session, version.ref)


def test_what_could_not_be_refreshed_is_not_held(tmp_path: Path) -> None:
    session = open_session(CONFIG, workspace_at(tmp_path))
    engine, missing = session.engine, replace(session.version, number=99)
    missing = replace(missing, sampler=replace(missing.sampler, uri="file:///nowhere", digest="0" * 64))
    with pytest.raises(SnapshotError):
        engine.versions.hold(engine.sampler, missing, "late")
    assert missing.ref not in engine.versions.held()
