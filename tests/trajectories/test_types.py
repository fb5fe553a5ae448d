"""Trajectories and datums refuse to be built when an invariant does not hold."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from opentinker_core.trajectories.datums import to_datum
from opentinker_core.trajectories.errors import TrajectoryError
from opentinker_core.trajectories.types import Datum, EndReason, Trajectory
from tests.trajectories.strategies import demonstration, two_turns


def _turn(trajectory: Trajectory, place: int, **changes: Any) -> tuple[Any, ...]:
    turns = list(trajectory.turns)
    turns[place] = replace(turns[place], **changes)
    return tuple(turns)


def _changed(array: np.ndarray, position: int, value: float) -> np.ndarray:
    copy = array.copy()
    copy[position] = value
    return copy


T = two_turns()
BROKEN_TRAJECTORIES: dict[str, dict[str, Any]] = {
    "tokens_T": {"tokens_T": T.tokens_T.astype(np.int64)},
    "tokens_T[3]": {"tokens_T": _changed(T.tokens_T, 3, -1)},
    "len(mask_T)": {"mask_T": T.mask_T[:-1]},
    "len(logprobs_T)": {"logprobs_T": np.append(T.logprobs_T, np.float32(0))},
    "mask_T[0]": {"mask_T": _changed(T.mask_T, 0, True)},
    "mask_T[4]": {"mask_T": _changed(T.mask_T, 4, True)},
    "logprobs_T[2]": {"logprobs_T": _changed(T.logprobs_T, 2, 0.1)},
    "logprobs_T[3]": {"logprobs_T": _changed(T.logprobs_T, 3, np.nan)},
    "logprobs_T[4]": {"logprobs_T": _changed(T.logprobs_T, 4, -0.1)},
    "trajectory_id": {"trajectory_id": ""},
    "seed": {"seed": 2**63},
    "turns[0].[start, end)": {"turns": _turn(T, 0, start=0)},
    "turns[1].[start, end)": {"turns": _turn(T, 1, start=3)},
    "turns[1].index": {"turns": _turn(T, 1, index=2)},
    "turns[0].version": {"turns": _turn(T, 0, version="adder")},
    "turns[0].agent": {"turns": _turn(T, 0, agent="critic")},
    "turns[0].reward": {"turns": _turn(T, 0, reward=float("inf"))},
    "mask_T[5]": {"turns": T.turns[:1]},
}


@pytest.mark.parametrize("field", BROKEN_TRAJECTORIES)
def test_a_broken_trajectory_is_refused_by_the_name_of_its_field(field: str) -> None:
    with pytest.raises(TrajectoryError) as caught:
        replace(T, **BROKEN_TRAJECTORIES[field])
    assert caught.value.field == field
    assert field in str(caught.value)


def test_empty_turns_are_refused() -> None:
    with pytest.raises(TrajectoryError, match="non-empty span"):
        replace(T, turns=_turn(T, 1, end=5))


def test_arrays_cannot_be_changed_afterwards() -> None:
    mine = T.tokens_T.copy()
    trajectory = replace(T, tokens_T=mine)
    mine[0] = 99
    assert trajectory.tokens_T[0] == 10
    with pytest.raises(ValueError, match="read-only"):
        trajectory.tokens_T[0] = 99


def test_the_reward_is_the_sum_of_the_turns() -> None:
    assert T.reward == 1.25


def test_a_failed_episode_has_no_reward() -> None:
    assert replace(T, end_reason=EndReason.FAILED).reward is None


def test_a_missing_reward_of_one_turn_is_missing_in_the_sum() -> None:
    assert replace(T, turns=_turn(T, 0, reward=None)).reward is None


def test_equality_compares_contents() -> None:
    assert two_turns() == T
    assert replace(T, tokens_T=_changed(T.tokens_T, 0, 99)) != T
    assert replace(T, turns=_turn(T, 0, reward=0.5)) != T


RL = to_datum(T, advantages=[1.0, -2.0], temperature=0.7)
SFT = to_datum(demonstration(), weights=1.0)
BROKEN_DATUMS: dict[str, tuple[Datum, dict[str, Any]]] = {
    "input_tokens_N": (RL, {"input_tokens_N": RL.input_tokens_N.astype(np.int32)}),
    "len(target_tokens_N)": (RL, {"target_tokens_N": RL.target_tokens_N[1:]}),
    "len(advantages_N)": (RL, {"advantages_N": RL.advantages_N[1:]}),  # type: ignore[index]
    "target_tokens_N[1]": (RL, {"target_tokens_N": _changed(RL.target_tokens_N, 1, 5)}),
    "advantages_N[0]": (RL, {"advantages_N": _changed(RL.advantages_N, 0, 1.0)}),  # type: ignore[arg-type]
    "advantages_N[1]": (RL, {"advantages_N": _changed(RL.advantages_N, 1, np.inf)}),  # type: ignore[arg-type]
    "sampler_logprobs_N[3]": (RL, {"sampler_logprobs_N": np.full(5, -1, np.float32)}),
    "sampler_logprobs_N": (RL, {"sampler_logprobs_N": None}),
    "signal": (RL, {"weights_N": RL.advantages_N}),
    "mask_N": (SFT, {"mask_N": np.zeros(2, bool), "weights_N": np.zeros(2, np.float32)}),
    "weights_N[0]": (SFT, {"mask_N": np.array([False, True])}),
    "temperature": (RL, {"temperature": 0.0}),
    "top_p": (RL, {"top_p": 0.0}),
    "top_k": (RL, {"top_k": -1}),
}


@pytest.mark.parametrize("field", BROKEN_DATUMS)
def test_a_broken_datum_is_refused_by_the_name_of_its_field(field: str) -> None:
    datum, changes = BROKEN_DATUMS[field]
    with pytest.raises(TrajectoryError) as caught:
        replace(datum, **changes)
    assert caught.value.field.startswith(field.partition("[")[0])


def test_a_datum_without_any_signal_is_refused() -> None:
    with pytest.raises(TrajectoryError, match="exactly one of"):
        replace(SFT, weights_N=None)
