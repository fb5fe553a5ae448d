"""The shift by one: every sampled token is a target exactly once, with its own logprob and signal."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.trajectories.datums import to_datum
from opentinker_core.trajectories.errors import TrajectoryError
from opentinker_core.trajectories.fsm import TrajectoryBuilder
from opentinker_core.trajectories.types import DEMONSTRATION, Datum, EndReason, StopReason, Trajectory
from tests.trajectories.strategies import demonstration, trajectories, two_turns, with_masked_turns


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


def test_a_masked_turn_is_context() -> None:
    sampled = to_datum(two_turns(), advantages=[3.0, -2.0], without=[0])
    assert sampled.input_tokens_N.tolist() == [10, 11, 20, 21, 12]
    assert sampled.mask_N.tolist() == [False, False, False, False, True]
    assert sampled.advantages_N is not None
    assert sampled.advantages_N.tolist() == [0, 0, 0, 0, -2]
    assert sampled.sampler_logprobs_N is not None
    assert sampled.sampler_logprobs_N.tolist() == [0, 0, 0, 0, -2.5]
    supervised = to_datum(two_turns(), weights=0.5, without={1})
    assert supervised.target_tokens_N.tolist() == [11, 20, 21]
    assert supervised.weights_N is not None
    assert supervised.weights_N.tolist() == [0, 0.5, 0.5]


@pytest.mark.parametrize("signal", ["weights", "advantages"])
@given(masked=with_masked_turns(), data=st.data())
def test_masking_turns_changes_nothing_of_the_others(
    signal: str, masked: tuple[Trajectory, frozenset[int]], data: st.DataObject
) -> None:
    trajectory, without = masked
    some = st.floats(-2, 2, width=32).filter(bool)
    per_turn = {signal: [data.draw(some) for _ in trajectory.turns]}
    whole, part = to_datum(trajectory, **per_turn), to_datum(trajectory, **per_turn, without=without)
    kept = [turn for turn in trajectory.turns if turn.index not in without]
    at_N = np.flatnonzero(part.mask_N)
    assert (at_N + 1).tolist() == [place for turn in kept for place in range(turn.start, turn.end)]
    assert len(part) == kept[-1].end - 1
    assert part.input_tokens_N.tolist() == whole.input_tokens_N[: len(part)].tolist()
    assert part.target_tokens_N.tolist() == whole.target_tokens_N[: len(part)].tolist()
    for before, after in zip(_trained_arrays(whole), _trained_arrays(part), strict=True):
        assert after[at_N].tolist() == before[at_N].tolist()
        assert not after[~part.mask_N].any()


def _trained_arrays(datum: Datum) -> list[np.ndarray]:
    return [datum.signal] if datum.sampler_logprobs_N is None else [datum.signal, datum.sampler_logprobs_N]


@given(trajectories())
def test_masking_no_turn_changes_nothing(trajectory: Trajectory) -> None:
    assert to_datum(trajectory, advantages=1.0, without=()) == to_datum(trajectory, advantages=1.0)


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ([2], "without: 2 is not accepted; accepted: indices of the 2 turns"),
        ([-1], "without: -1 is not accepted; accepted: indices of the 2 turns"),
        ([0, 1], "trained tokens: 0"),
    ],
)
@pytest.mark.parametrize("signal", ["weights", "advantages"])
def test_turns_that_are_not_there_and_masking_all_of_them_are_refused(
    signal: str, without: list[int], message: str
) -> None:
    with pytest.raises(TrajectoryError, match=message):
        to_datum(two_turns(), **{signal: 1.0}, without=without)


def test_a_masked_demonstration_stands_in_the_way_of_no_advantage() -> None:
    builder = TrajectoryBuilder(trajectory_id="t", agent="solver", environment="arithmetic", seed=7)
    builder.observed([10])
    builder.generated([20], [0], DEMONSTRATION, StopReason.STOP)
    builder.rewarded(0.0)
    builder.observed([11])
    builder.generated([21], [-0.5], "adder@3", StopReason.STOP)
    builder.rewarded(1.0)
    trajectory = builder.terminate(EndReason.DONE)
    assert to_datum(trajectory, advantages=1.0, without={0}).mask_N.tolist() == [False, False, True]
    with pytest.raises(TrajectoryError, match=r"turns\[0\].version"):
        to_datum(trajectory, advantages=1.0, without={1})


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
