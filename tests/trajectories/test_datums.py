"""The shift by one: every sampled token is a target exactly once, with its own logprob and signal."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.trajectories.datums import to_datum
from opentinker_core.trajectories.errors import TrajectoryError
from opentinker_core.trajectories.types import Trajectory
from tests.trajectories.strategies import demonstration, trajectories, two_turns


def test_two_turns_by_hand() -> None:
    datum = to_datum(two_turns(), advantages=[1.0, -2.0], temperature=0.7, top_p=0.9, top_k=5)
    assert datum.input_tokens_N.tolist() == [10, 11, 20, 21, 12]
    assert datum.target_tokens_N.tolist() == [11, 20, 21, 12, 22]
    assert datum.mask_N.tolist() == [False, True, True, False, True]
    assert datum.advantages_N is not None
    assert datum.advantages_N.tolist() == [0, 1, 1, 0, -2]
    assert datum.sampler_logprobs_N is not None
    assert datum.sampler_logprobs_N.tolist() == [0, -0.5, -1.5, 0, -2.5]
    assert (datum.temperature, datum.top_p, datum.top_k, datum.trajectory_id) == (0.7, 0.9, 5, "t")


def test_the_last_prompt_token_predicts_the_first_generated_one() -> None:
    datum = to_datum(demonstration(), weights=1.0)
    assert datum.input_tokens_N[0] == 10
    assert datum.target_tokens_N[0] == 20
    assert datum.mask_N[0]


@given(trajectories(), st.data())
def test_every_sampled_token_is_a_target_once_with_its_logprob_and_advantage(
    trajectory: Trajectory, data: st.DataObject
) -> None:
    per_turn = [data.draw(st.floats(-2, 2, width=32)) for _ in trajectory.turns]
    datum = to_datum(trajectory, advantages=per_turn)
    assert datum.advantages_N is not None
    assert datum.sampler_logprobs_N is not None
    at_N = np.flatnonzero(datum.mask_N)
    spans = [range(turn.start, turn.end) for turn in trajectory.turns]
    positions = [position for span in spans for position in span]
    assert (at_N + 1).tolist() == positions
    assert datum.mask_N.sum() == trajectory.mask_T.sum() == trajectory.sampled_tokens
    assert datum.target_tokens_N[at_N].tolist() == trajectory.tokens_T[positions].tolist()
    assert datum.sampler_logprobs_N[at_N].tolist() == trajectory.logprobs_T[positions].tolist()
    expected = [value for value, span in zip(per_turn, spans, strict=True) for _ in span]
    assert datum.advantages_N[at_N].tolist() == expected


@given(trajectories())
def test_inputs_are_all_that_the_sampler_saw_and_nothing_after_the_last_trained_token(
    trajectory: Trajectory,
) -> None:
    datum = to_datum(trajectory, weights=1.0)
    end = trajectory.turns[-1].end
    assert datum.input_tokens_N.tolist() == trajectory.tokens_T[: end - 1].tolist()
    assert datum.target_tokens_N.tolist() == trajectory.tokens_T[1:end].tolist()
    assert datum.mask_N[-1]


def test_a_turn_of_weight_zero_is_context() -> None:
    datum = to_datum(two_turns(), weights=[1.0, 0.0])
    assert datum.target_tokens_N.tolist() == [11, 20, 21]
    assert datum.mask_N.tolist() == [False, True, True]


def test_a_turn_of_advantage_zero_is_still_counted() -> None:
    datum = to_datum(two_turns(), advantages=[1.0, 0.0])
    assert datum.mask_N.tolist() == [False, True, True, False, True]


@pytest.mark.parametrize(
    ("signal", "message"),
    [
        ({}, "exactly one of weights and advantages"),
        ({"weights": 1.0, "advantages": 1.0}, "exactly one of weights and advantages"),
        ({"advantages": [1.0]}, "2 turns"),
        ({"weights": [1.0, 2.0, 3.0]}, "2 turns"),
        ({"weights": 0.0}, "at least one"),
        ({"advantages": float("nan")}, "finite"),
        ({"advantages": 1.0, "temperature": 0.0}, "greedy"),
    ],
)
def test_wrong_signals_are_refused(signal: dict[str, Any], message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        to_datum(two_turns(), **signal)


def test_demonstrations_take_no_advantages() -> None:
    with pytest.raises(TrajectoryError, match="demonstrations take weights"):
        to_datum(demonstration(), advantages=1.0)
