"""A trajectory as a trace: what is shown, whose ids it has, which episodes are drawn."""

from datetime import UTC, datetime

import pytest

from opentinker_core.lineage.traces import draw_episodes, episode_trace
from opentinker_core.policies.types import TrajectorySet
from opentinker_core.trajectories.types import Trajectory
from tests.lineage.training import episode

SET = TrajectorySet(
    "set-1", "file:///sets/1", "d" * 64, 4, 8, "arithmetic", "adder@3", "run-1", 4, "train", 0.5
)
AT = datetime(2026, 1, 2, tzinfo=UTC)


def trace(trajectory: Trajectory, trajectory_set: TrajectorySet = SET):
    return episode_trace(
        trajectory, trajectory_set, experiment_id="1", mlflow_run_id="r", trained="adder@4", created_at=AT
    )


def test_a_trace_has_the_episode_as_root_and_one_llm_span_a_turn() -> None:
    info, spans = trace(episode(1, "adder@3", turns=3))
    assert [span.name for span in spans] == ["episode", "turn-0", "turn-1", "turn-2"]
    assert [span.span_type for span in spans] == ["AGENT", "LLM", "LLM", "LLM"]
    assert {span.parent_id for span in spans[1:]} == {spans[0].span_id}
    assert {span.trace_id for span in spans} == {info.trace_id}
    assert len({span.span_id for span in spans}) == 4


def test_turns_show_text_where_it_was_recorded_and_token_ids_elsewhere() -> None:
    _, spans = trace(episode(1, "adder@3", turns=2))
    assert (spans[1].inputs, spans[1].outputs) == ("1 + 1 =", "answer 0")
    assert (spans[2].inputs, spans[2].outputs) == ([1, 2, 11], "answer 1")
    _, spans = trace(episode(1, "adder@3", turns=2, text=False))
    assert (spans[1].inputs, spans[1].outputs) == ([1, 2, 10], [20, 3])
    assert (spans[2].inputs, spans[2].outputs) == ([1, 2, 11], [21, 3])


def test_a_trace_names_version_trajectory_and_set() -> None:
    info, spans = trace(episode(1, "adder@3"))
    assert info.trace_metadata["ot.policy_version"] == "adder@3"
    assert info.trace_metadata["ot.trained"] == "adder@4"
    assert info.trace_metadata["ot.trajectory_id"] == "s00001-g1-m0"
    assert info.trace_metadata["ot.set_digest"] == "d" * 64
    assert spans[1].attributes["ot.version"] == "adder@3"


@pytest.mark.parametrize(("failed", "rewards", "state"), [(False, [1.0], "OK"), (True, [], "ERROR")])
def test_the_reward_is_feedback_and_a_missing_one_is_none(
    failed: bool, rewards: list[float], state: str
) -> None:
    info, _ = trace(episode(1, "adder@3", failed=failed))
    assert [feedback.value for feedback in info.assessments] == rewards
    assert info.state.value == state


def test_the_same_episode_has_the_same_id_and_one_of_another_set_has_another() -> None:
    first, again = trace(episode(1, "adder@3"))[0], trace(episode(1, "adder@3"))[0]
    other = trace(episode(1, "adder@3"), TrajectorySet(**{**vars(SET), "set_id": "set-2"}))[0]
    assert first.trace_id == again.trace_id
    assert first.assessments[0].assessment_id == again.assessments[0].assessment_id
    assert first.trace_id != other.trace_id


def test_the_sample_is_always_the_same_in_order_and_never_more_than_there_are() -> None:
    drawn = draw_episodes(8, 3, "set-1")
    assert len(set(drawn)) == 3
    assert drawn == sorted(drawn) == draw_episodes(8, 3, "set-1")
    assert draw_episodes(8, 100, "set-1") == list(range(8))
    assert len({tuple(draw_episodes(8, 3, f"set-{i}")) for i in range(20)}) > 5
