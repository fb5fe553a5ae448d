"""Runs that share one engine: each is what it is alone, and they do meet in fused batches."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from opentinker_core.runtime.engine import open_engine
from opentinker_core.runtime.operations import Kind, Operation
from opentinker_core.runtime.session import RunSession, open_session
from opentinker_core.sampling.protocol import BASE, SampledSequence, SampleRequest, SamplingParams
from tests.runtime.runs import run_to_the_end, small_config, workspace_at

FIRST = small_config(seed=1, sft=None)
STEPS = 3
SECOND = small_config(
    name="other",
    seed=2,
    policy={
        "name": "other",
        "base_model": "tiny",
        "lora": {"rank": 12, "alpha": 24.0, "target_modules": "all-linear"},
    },
    sft=None,
    rl={
        "steps": STEPS,
        "groups": 4,
        "group_size": 6,
        "sampling": {"max_tokens": 5, "temperature": 0.8},
        "objective": {"kl_coefficient": 0.05},  # so that episodes without reward train, too
        "optimizer": {"learning_rate": 2e-3, "weight_decay": 0.01},
    },
)


def _losses(session: RunSession) -> list[float]:
    versions = session.workspace.catalog.run_versions(session.run.run_id)
    return [version.metrics["loss"] for version in versions if "loss" in version.metrics]


def _sampled_by(session: RunSession) -> set[str]:
    return {
        turn.version
        for item in session.sets.training()
        for trajectory in session.sets.load(item)
        for turn in trajectory.turns
    }


def _long() -> Operation[list[list[SampledSequence]]]:
    request = SampleRequest((5,), SamplingParams(max_tokens=150), BASE, (0,))
    return Operation(Kind.SAMPLE, "somebody", BASE, [request], tokens=151, sequences=1)


def test_two_runs_at_once_are_what_each_is_alone(tmp_path: Path) -> None:
    alone = [
        run_to_the_end(open_session(config, workspace_at(tmp_path / config.name)))
        for config in (FIRST, SECOND)
    ]
    workspace = workspace_at(tmp_path / "together")
    sessions = [open_session(config, workspace) for config in (FIRST, SECOND)]
    assert sessions[0].engine.shared is sessions[1].engine.shared
    start = Barrier(2)

    def meet(session: RunSession) -> None:
        """Begin a phase together, behind something that keeps the engine busy until both have come."""
        if session is sessions[0]:
            session.engine.shared.scheduler.submit(_long())
        start.wait()

    def run(session: RunSession) -> RunSession:
        for step in range(1, STEPS + 1):
            meet(session)
            session.build_batch(step, session.rollout(step))
            meet(session)
            session.publish(step, session.update(step))
            session.refresh(session.version)
        return run_to_the_end(session)

    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(run, sessions))

    for one, other in zip(alone, together, strict=True):
        assert _losses(other) == pytest.approx(_losses(one), rel=1e-5, abs=1e-7)
        assert other.token_ids_digest() == one.token_ids_digest()
        published = {version.ref for version in workspace.catalog.run_versions(other.run.run_id)}
        assert _sampled_by(other) <= published | {"demonstration"}
        assert len(_sampled_by(other) & published) == other.config.rl.steps
    kinds = sessions[0].engine.statistics().kinds
    assert all(kind.failed == 0 for kind in kinds.values())
    assert max(kinds[Kind.SAMPLE].batch_sizes) >= 2
    assert 2 in kinds[Kind.FORWARD_BACKWARD].batch_sizes


def test_an_engine_ends_with_the_last_who_holds_it(tmp_path: Path) -> None:
    workspace = workspace_at(tmp_path / "home")
    config = small_config().runtime
    first = open_engine("tiny", config, workspace.home, workspace.snapshots.fetch)
    second = open_engine("tiny", config, workspace.home, workspace.snapshots.fetch)
    other = open_engine(
        "tiny", config.model_copy(update={"pack": True}), workspace.home, workspace.snapshots.fetch
    )
    assert first.shared is second.shared is not other.shared
    close = first.shared.close
    del first
    assert close.alive
    del second
    assert not close.alive
