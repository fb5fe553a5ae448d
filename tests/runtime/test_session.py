"""A run's phases: repeatable, resumable from the last published version, with exact lineage."""

from dataclasses import replace
from pathlib import Path

import pytest

from opentinker_core.config.schema import TrainConfig
from opentinker_core.digests import digest_json
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.policies.types import Evaluation, RunStatus
from opentinker_core.runtime.opening import recorded_config
from opentinker_core.runtime.session import RunSession, open_session
from opentinker_core.sampling.protocol import BASE
from opentinker_core.snapshots.protocol import SnapshotError
from tests.runtime.runs import run_to_the_end, small_config, train, workspace_at


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunSession:
    return train(tmp_path_factory.mktemp("finished"), small_config())


def _outcome(session: RunSession) -> tuple[object, ...]:
    versions = session.workspace.catalog.run_versions(session.run.run_id)
    return (
        session.token_ids_digest(),
        [version.metrics.get("loss") for version in versions],
        [version.sampler.digest for version in versions],
    )


def test_versions_follow_the_steps_and_form_a_chain(finished: RunSession) -> None:
    versions = finished.workspace.catalog.run_versions(finished.run.run_id)
    assert [version.step for version in versions] == [0, 4, 6, 7, 8, 9]
    assert [version.phase for version in versions] == ["init", "sft", "sft", "rl", "rl", "rl"]
    assert [version.parent for version in versions] == [None, *(version.ref for version in versions[:-1])]
    assert finished.workspace.catalog.run(finished.run.run_id).status is RunStatus.COMPLETED


def test_every_version_names_what_trained_it(finished: RunSession) -> None:
    catalog = finished.workspace.catalog
    for version in catalog.run_versions(finished.run.run_id)[1:]:
        (trained_on,) = catalog.lineages([version.ref])[0].trained_on
        assert trained_on.sampled_by == ("demonstration" if version.phase == "sft" else version.parent)
        trajectories = finished.workspace.trajectories.load(trained_on.uri, trained_on.digest)
        assert {turn.version for t in trajectories for turn in t.turns} == {trained_on.sampled_by}
        assert sum(t.sampled_tokens for t in trajectories) == trained_on.tokens


def test_the_same_config_gives_the_same_tokens_losses_and_snapshots(
    finished: RunSession, tmp_path: Path
) -> None:
    assert _outcome(train(tmp_path, small_config())) == _outcome(finished)


def test_each_phase_has_its_own_schedule_of_the_learning_rate(tmp_path: Path) -> None:
    plain = small_config().model_dump(mode="json")
    plain["sft"]["optimizer"] |= {"warmup_steps": 5}
    plain["rl"]["optimizer"] |= {"schedule": "linear"}
    session = train(tmp_path, TrainConfig.model_validate(plain))
    _, *versions = session.workspace.catalog.run_versions(session.run.run_id)
    rates = [version.metrics["learning_rate"] for version in versions]
    assert rates == pytest.approx([2e-2 * 4 / 5, 2e-2, 1e-3, 1e-3 * 2 / 3, 1e-3 / 3])


def test_another_seed_gives_others(finished: RunSession, tmp_path: Path) -> None:
    assert _outcome(train(tmp_path, small_config(seed=1)))[0] != _outcome(finished)[0]


@pytest.mark.parametrize("phase", ["sft", "rollout", "batch", "update", "publish"])
def test_a_run_left_after_any_phase_ends_as_one_that_was_left_alone(
    finished: RunSession, tmp_path: Path, phase: str
) -> None:
    session = open_session(small_config(), workspace_at(tmp_path))
    session.publish(4, session.sft(1, 4))
    if phase == "sft":
        session.sft(5, 6)
    else:
        session.publish(6, session.sft(5, 6))
        session.refresh(session.version)
        episodes = session.rollout(7)
        if phase != "rollout":
            session.build_batch(7, episodes)
        if phase in ("update", "publish"):
            metrics = session.update(7)
            if phase == "publish":
                session.publish(7, metrics)
    again = open_session(None, workspace_at(tmp_path), run_id=session.run.run_id)
    assert _outcome(run_to_the_end(again)) == _outcome(finished)


def test_a_repeated_update_starts_from_the_published_state(finished: RunSession, tmp_path: Path) -> None:
    session = open_session(small_config(), workspace_at(tmp_path))
    session.publish(4, session.sft(1, 4))
    session.sft(5, 6)  # as if the phase failed before it could publish
    session.publish(6, session.sft(5, 6))
    session.refresh(session.version)
    session.update(7)
    session.refresh(session.publish(7, session.update(7)))
    assert _outcome(run_to_the_end(session)) == _outcome(finished)


def test_a_retried_flow_run_goes_on_with_its_run(tmp_path: Path) -> None:
    first = open_session(small_config(), workspace_at(tmp_path), flow_run_id="flow-1")
    again = open_session(small_config(), workspace_at(tmp_path), flow_run_id="flow-1")
    other = open_session(small_config(), workspace_at(tmp_path), flow_run_id="flow-2")
    assert again.run.run_id == first.run.run_id != other.run.run_id


def test_a_run_goes_on_only_with_its_own_config(tmp_path: Path) -> None:
    session = open_session(small_config(), workspace_at(tmp_path))
    with pytest.raises(UsageError, match="accepted: the same config"):
        open_session(small_config(seed=5), workspace_at(tmp_path), run_id=session.run.run_id)


def test_a_run_that_was_started_before_configs_had_a_field_goes_on_with_its_config(tmp_path: Path) -> None:
    run = open_session(small_config(), workspace_at(tmp_path)).run
    older = {**run.config, "runtime": {k: v for k, v in run.config["runtime"].items() if k != "url"}}
    before = replace(run, config=older, config_digest=digest_json(older))
    assert recorded_config(before, small_config()) == small_config()
    with pytest.raises(UsageError, match="not the one"):
        recorded_config(before, small_config(seed=5))


def _prompts(session: RunSession, evaluation: Evaluation) -> list[str]:
    assert evaluation.trajectory_set is not None
    loaded = session.workspace.trajectories.load(evaluation.trajectory_set.uri)
    return [trajectory.info["prompt"] for trajectory in loaded]


def test_evaluations_share_problems_and_are_made_once(finished: RunSession) -> None:
    base = finished.evaluate(BASE)
    trained = finished.evaluate(finished.version.ref)
    assert _prompts(finished, base) == _prompts(finished, trained)
    assert finished.evaluate(BASE) == base
    assert base.low <= base.mean <= base.high
    assert finished.workspace.catalog.aliases("adder")["best"] == finished.version.number


def test_held_out_problems_are_never_trained_on(finished: RunSession) -> None:
    def prompts(purpose: str) -> set[str]:
        sets = finished.workspace.catalog.trajectory_sets(finished.run.run_id, purpose=purpose)
        return {t.info["prompt"] for s in sets for t in finished.workspace.trajectories.load(s.uri)}

    finished.evaluate(BASE)
    trained, evaluated = prompts("train"), prompts("evaluation")
    assert trained
    assert evaluated
    assert not trained & evaluated


def test_old_checkpoints_are_pruned_and_snapshots_kept(finished: RunSession) -> None:
    versions = finished.workspace.catalog.run_versions(finished.run.run_id)
    assert [version.checkpoint is not None for version in versions] == [False] * 4 + [True] * 2
    for version in versions:
        assert finished.workspace.snapshots.fetch(version.sampler.uri, version.sampler.digest).is_dir()


def _drawn_to_start() -> TrainConfig:
    """The small config with a penalty towards what the RL phase began with; one checkpoint is kept."""
    plain = small_config().model_dump(mode="json")
    plain["rl"]["objective"] |= {"kl_reference": "start"}
    plain["record"]["keep_checkpoints"] = 1
    return TrainConfig.model_validate(plain)


def test_the_penalty_can_draw_towards_what_the_rl_phase_began_with(
    finished: RunSession, tmp_path: Path
) -> None:
    session = train(tmp_path, _drawn_to_start())
    versions = session.workspace.catalog.run_versions(session.run.run_id)
    assert [version.step for version in versions if version.checkpoint is not None] == [6, 9]
    kl = [version.metrics["reference_kl"] for version in versions if version.phase == "rl"]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert 1e-6 < kl[1] < kl[2]
    towards_base = finished.workspace.catalog.run_versions(finished.run.run_id)[3]
    assert towards_base.metrics["reference_kl"] > 0.01  # imitation has led away from there


def test_a_run_drawn_towards_its_start_goes_on_as_one_that_was_left_alone(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", _drawn_to_start())
    workspace = workspace_at(tmp_path / "cut")
    session = open_session(_drawn_to_start(), workspace)
    session.publish(4, session.sft(1, 4))
    session.publish(6, session.sft(5, 6))
    session.refresh(session.version)
    for step in (7, 8):
        session.publish(step, session.update(step))
        session.refresh(session.version)
    again = open_session(None, workspace_at(tmp_path / "cut"), run_id=session.run.run_id)
    assert _outcome(run_to_the_end(again)) == _outcome(whole)


def _going_on(finished: RunSession, start: str, name: str) -> TrainConfig:
    config = finished.config.model_dump(mode="json")
    config["policy"] |= {"start": start, "name": name}
    return TrainConfig.model_validate(config | {"sft": None, "name": f"from-{name}"})


def test_a_run_can_go_on_from_a_version_of_its_policy(tmp_path: Path) -> None:
    first = train(tmp_path, small_config())
    second = train(tmp_path, _going_on(first, "latest", "adder"))
    start, after = second.workspace.catalog.run_versions(second.run.run_id)[:2]
    assert start.parent == first.version.ref
    assert start.sampler.digest == first.version.sampler.digest
    assert after.number > start.number > first.version.number
    assert second.config.policy.start == first.version.ref  # pinned, so that a resume means the same


def test_a_run_can_fork_another_policy(tmp_path: Path) -> None:
    first = train(tmp_path, small_config())
    fork = train(tmp_path, _going_on(first, first.version.ref, "other"))
    assert fork.policy.forked_from == first.version.ref
    assert fork.workspace.catalog.run_versions(fork.run.run_id)[0].number == 0
    assert fork.workspace.catalog.versions("adder")[-1].ref == first.version.ref


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": "99"}, r"policy\.start: '99' names no version: .*adder@99"),
        ({"start": "adder@"}, r"policy\.start: 'adder@' names no version"),
        ({"start": "0"}, "was pruned"),
        ({"start": "latest", "lora": {"rank": 2}}, r"policy\.lora"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(
    finished: RunSession, changes: dict[str, object], message: str
) -> None:
    config = finished.config.model_dump(mode="json")
    config["policy"] |= changes
    with pytest.raises(UsageError, match=message):
        open_session(TrainConfig.model_validate(config), finished.workspace)


def test_a_wrong_environment_or_target_starts_no_run(tmp_path: Path) -> None:
    wrong = [
        small_config(environment={"id": "arithmetics"}),
        small_config(environment={"id": "arithmetic", "args": {"digitz": 2}}),
        small_config(policy={"name": "a", "base_model": "tiny", "lora": {"target_modules": ["c_attn"]}}),
        small_config(policy={"name": "a", "base_model": "no-such-model"}),
    ]
    workspace = workspace_at(tmp_path)
    for config in wrong:
        with pytest.raises(UsageError, match=r"accepted|did you mean"):
            open_session(config, workspace)
    assert workspace.catalog.runs() == []
    assert workspace.catalog.policies() == []


def test_a_damaged_checkpoint_is_refused_not_trained_on(tmp_path: Path) -> None:
    session = open_session(small_config(), workspace_at(tmp_path))
    version = session.publish(4, session.sft(1, 4))
    assert version.checkpoint is not None
    file = session.workspace.snapshots.fetch(version.checkpoint.uri) / "optimizer.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(bytes(damaged))
    again = open_session(None, workspace_at(tmp_path), run_id=session.run.run_id)
    with pytest.raises(SnapshotError, match=r"optimizer\.safetensors"):
        again.sft(5, 6)


def test_a_run_without_any_config_is_asked_for_one(tmp_path: Path) -> None:
    with pytest.raises(OpenTinkerError, match="config: missing"):
        open_session(None, workspace_at(tmp_path))


def test_best_stays_with_the_better_version_of_another_run(tmp_path: Path) -> None:
    first = train(tmp_path, small_config())
    catalog = first.workspace.catalog
    version = first.version
    catalog.add_evaluation(
        Evaluation(version.ref, None, version.step, "arithmetic", mean=1.0, low=0.9, high=1.0, episodes=8)
    )
    second = train(tmp_path, small_config(seed=1))
    assert second.version.number > version.number
    assert catalog.aliases("adder")["latest"] == second.version.number
    assert catalog.aliases("adder")["best"] == version.number


def test_a_policy_that_another_run_is_training_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workspace = workspace_at(tmp_path)
    first = open_session(small_config(), workspace)
    assert not caplog.records
    open_session(small_config(), workspace)
    (warning,) = caplog.records
    assert f"run {first.run.run_id} is training it too" in warning.message
