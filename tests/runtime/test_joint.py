"""Joint runs: one rollout for all, each policy trains on its own turns, and the log is checked."""

import json
from pathlib import Path
from typing import Any

import pytest

from opentinker_core.agents.coordination.log import EventLog, Kind
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.runtime.joint import JointSession
from opentinker_core.trajectories.types import Trajectory
from tests.runtime.joint_runs import CONFIG, joint_config, open_joint, outcome, run_jointly
from tests.runtime.runs import workspace_at


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> JointSession:
    return run_jointly(open_joint(tmp_path_factory.mktemp("joint"), joint_config()))


def _trained_on(joint: JointSession, name: str, step: int) -> list[Trajectory]:
    member = joint.members[name]
    stored = member.sets.stored(step)
    assert stored is not None
    return member.sets.load(stored)


def test_each_policy_trains_on_the_turns_of_its_own_agents_alone(finished: JointSession) -> None:
    for name, agent in (("black", "X"), ("white", "O")):
        member = finished.members[name]
        versions = {one.step: one.ref for one in member.workspace.catalog.run_versions(member.run.run_id)}
        for step in range(9, 11):
            trajectories = _trained_on(finished, name, step)
            assert {one.agent for one in trajectories} == {agent}
            before = max(one for one in versions if one < step)
            turns = [turn for one in trajectories for turn in one.turns]
            assert {turn.version for turn in turns} == {versions[before]}


def test_the_rewards_of_both_sides_are_those_of_one_game(finished: JointSession) -> None:
    black, white = (
        {(one.group, one.member): one for one in _trained_on(finished, name, 9)}
        for name in ("black", "white")
    )
    assert black.keys() == white.keys()
    assert len(black) == 16
    both = [(black[place].reward, white[place].reward) for place in black]
    known = [(ours, theirs) for ours, theirs in both if ours is not None and theirs is not None]
    assert known
    assert all(ours + theirs == 0 for ours, theirs in known)


def test_others_moves_are_observations(finished: JointSession) -> None:
    tokenizer = finished.members["black"].engine.tokenizer
    long = [one for one in _trained_on(finished, "black", 9) if len(one.turns) > 1]
    assert long
    for one in long:
        between = one.tokens_T[one.turns[0].end : one.turns[1].start]
        assert "O:" in tokenizer.decode(between.tolist())
        assert not one.mask_T[one.turns[0].end : one.turns[1].start].any()


def test_the_log_of_every_step_is_kept_and_was_checked(finished: JointSession) -> None:
    folder = finished.members["black"].workspace.home / "runs" / "j1" / "events"
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [f"step-{step:06d}.jsonl" for step in (9, 10)]
    log = EventLog.read(files[-1].read_text().splitlines())
    kinds = [event.kind for event in log]
    assert kinds.count(Kind.OPENED) == kinds.count(Kind.ENDED) == 16
    assert kinds.count(Kind.PHASE_BEGAN) == 5  # one rollout; an update and a refresh of each


def test_a_step_that_broke_its_protocol_stops_the_run(tmp_path: Path) -> None:
    joint = open_joint(tmp_path, joint_config(rl=CONFIG["rl"] | {"steps": 1}))

    def forge(phase: str, step: int) -> None:
        if phase == "refresh":
            file = next((joint.members["black"].workspace.home / "runs" / "j1" / "events").iterdir())
            assert file.exists()
            joint._journal.log.append(
                Kind.ACTED,
                step,
                episode="s00009-g0-m0",
                round=99,
                agent="X",
                attempt=1,
                version="black@0",
                detail={"text": "a1"},
            )
            joint._journal.log.append(
                Kind.STEPPED,
                step,
                episode="s00009-g0-m0",
                round=99,
                detail={
                    "actions": {"X": "a1"},
                    "rewards": {"X": 1.0},
                    "to_act": [],
                    "together": False,
                    "observations": {},
                },
            )

    with pytest.raises(OpenTinkerError, match="step 9 breaks its protocol"):
        run_jointly(joint, forge)


class _StoppedError(Exception):
    pass


@pytest.mark.parametrize(
    "points",
    [
        [("publish white", 10)],
        [("rollout", 10), ("update", 10), ("publish black", 10), ("publish white", 10), ("evaluate", 10)],
    ],
    ids=["once", "at every phase"],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_end(
    finished: JointSession, tmp_path: Path, points: list[tuple[str, int]]
) -> None:
    for point in points:

        def stop(phase: str, step: int, point: tuple[str, int] = point) -> None:
            if (phase, step) == point:
                raise _StoppedError

        with pytest.raises(_StoppedError):
            run_jointly(open_joint(tmp_path, joint_config()), stop)
    again = run_jointly(open_joint(tmp_path, joint_config()))
    assert outcome(again) == outcome(finished)


def test_swapping_two_policies_swaps_their_outcomes(finished: JointSession, tmp_path: Path) -> None:
    protocol = {"policies": {"X": "white", "O": "black"}, "order": "sequential"}
    swapped = outcome(run_jointly(open_joint(tmp_path, joint_config(protocol=protocol))))
    straight = outcome(finished)

    def digests(one: tuple[Any, ...]) -> tuple[Any, ...]:
        return one[0], [version[2] for version in one[1]]

    assert digests(swapped["white"]) == digests(straight["black"])
    assert digests(swapped["black"]) == digests(straight["white"])


def test_one_policy_can_play_both_sides(tmp_path: Path) -> None:
    changes = {
        "policies": {"player": {}},
        "protocol": {"policies": {"X": "player", "O": "player"}, "order": "sequential"},
        "rl": CONFIG["rl"] | {"credit": {"baseline": "running"}},
    }
    joint = run_jointly(open_joint(tmp_path, joint_config(**changes)))
    trajectories = _trained_on(joint, "player", 9)
    assert [one.agent for one in trajectories[:2]] == ["X", "O"]
    metrics = joint.members["player"].version.metrics
    assert {"reward/X", "reward/O", "baseline/X/mean", "baseline/O/mean"} <= set(metrics)


def test_opponents_are_drawn_from_past_versions_and_not_trained(tmp_path: Path) -> None:
    changes = {
        "policies": {"player": {}},
        "opponents": {"rival": {"kind": "league"}},
        "protocol": {"policies": {"X": "player", "O": "rival"}, "order": "sequential"},
    }
    joint = run_jointly(open_joint(tmp_path, joint_config(**changes)))
    folder = joint.members["player"].workspace.home / "runs" / "j1" / "events"
    log = EventLog.read((folder / "step-000010.jsonl").read_text().splitlines())
    met = {event.version for event in log if event.kind is Kind.ASKED and event.agent == "O"}
    assert len(met) > 1
    assert all(version.startswith("player@") for version in met)
    assert {one.agent for one in _trained_on(joint, "player", 10)} == {"X"}


def test_a_policy_may_be_evaluated_elsewhere(tmp_path: Path) -> None:
    alone = {"id": "gomoku", "args": {"size": 3, "line": 3, "opening": 1, "side": "X"}}
    config = joint_config(policies={"black": {"evaluate_in": alone}, "white": {}}, rl=None)
    joint = run_jointly(open_joint(tmp_path, config))
    black, white = joint.members["black"], joint.members["white"]
    assert black.evaluate(black.version.ref).environment == "gomoku"
    (jointly,) = white.workspace.catalog.evaluations(run_id=white.run.run_id, subject=white.version.ref)
    assert jointly.environment == "gomoku_match"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "policies": {"black": {}},
                "protocol": {"policies": {"X": "black", "O": "blue"}, "order": "sequential"},
            },
            "'blue' is neither",
        ),
        ({"policies": {"black": {}, "white": {}, "red": {}}}, "policies: 'red' plays no agent"),
        ({"opponents": {"white": {"kind": "current"}}}, "'white' is in 'policies' too"),
        ({"policies": {"black": {"rl": {"steps": 5}}, "white": {}}}, "different numbers of steps"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        joint_config(**changes)


def test_agents_that_the_environment_does_not_have_are_refused(tmp_path: Path) -> None:
    protocol = {"policies": {"X": "black", "Y": "white"}, "order": "sequential"}
    with pytest.raises(UsageError, match="agents X, Y; accepted: those of environment 'gomoku_match', X, O"):
        open_joint(tmp_path, joint_config(protocol=protocol))


def test_configs_survive_json(finished: JointSession) -> None:
    config = joint_config()
    assert type(config).model_validate(json.loads(config.model_dump_json())) == config


def test_opponents_that_are_not_there_are_refused_before_anything_is_recorded(tmp_path: Path) -> None:
    opponents = {"white": {"kind": "frozen", "version": "champion@3"}}
    config = joint_config(policies={"black": {}}, opponents=opponents)
    with pytest.raises(UsageError, match=r"opponents\.white\.version: .*champion"):
        open_joint(tmp_path, config)
    assert workspace_at(tmp_path).catalog.runs() == []


def test_a_policy_that_plays_in_no_demonstration_is_told_of(tmp_path: Path) -> None:
    protocol = CONFIG["protocol"] | {"max_rounds": 1}  # O never moves
    with pytest.raises(UsageError, match=r"sft: none of the demonstrations .* policy 'white'"):
        run_jointly(open_joint(tmp_path, joint_config(protocol=protocol)))


def test_an_order_that_is_not_the_environments_is_told_of(tmp_path: Path) -> None:
    protocol = CONFIG["protocol"] | {"order": "simultaneous"}
    with pytest.raises(OpenTinkerError, match=r"asks for X, against protocol\.order 'simultaneous' of X, O"):
        run_jointly(open_joint(tmp_path, joint_config(protocol=protocol)))


class Killed(Exception):  # noqa: N818 - as KeyboardInterrupt
    """As a kill before the updates of the last step."""


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(b"\xff" + file.read_bytes()),
        lambda file: file.write_text("[" * 100_000),
        lambda file: file.write_text(file.read_text()[:-50]),
        lambda file: file.write_text(file.read_text().replace('"reward": 1.0', '"reward": 0.5')),
        lambda file: file.unlink(),
    ],
    ids=["bytes", "brackets", "cut", "changed", "removed"],
)
def test_a_log_that_was_spoilt_is_told_of_and_one_that_is_gone_is_warned_of(
    spoil: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = joint_config(sft=None, rl=CONFIG["rl"] | {"steps": 1})

    def kill(phase: str, step: int) -> None:
        if phase == "update":
            raise Killed

    with pytest.raises(Killed):
        run_jointly(open_joint(tmp_path, config), kill)
    (file,) = (tmp_path / "runs" / "j1" / "events").iterdir()
    spoil(file)
    if file.exists():
        with pytest.raises(OpenTinkerError, match=rf"{file}: .*; accepted: the log as it was written"):
            run_jointly(open_joint(tmp_path, config))
    else:
        run_jointly(open_joint(tmp_path, config))
        assert f"{file} is not there: the episodes of step 1 are not checked" in caplog.text
