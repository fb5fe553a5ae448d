"""The invariants of trajectories and datums. Every failure is a `TrajectoryError` naming field and value."""

import math
import re
from typing import TYPE_CHECKING

import numpy as np

from opentinker_core.trajectories.errors import TrajectoryError

if TYPE_CHECKING:
    from opentinker_core.trajectories.types import Datum, Trajectory, Turn

DEMONSTRATION = "demonstration"
"""The version name of tokens that no model sampled: supervised data. Their logprobs are 0."""

_VERSION = re.compile(rf"(base|{DEMONSTRATION}|[A-Za-z0-9][A-Za-z0-9._-]{{0,62}}@\d+)\Z")
_INT64 = range(-(2**63), 2**63)


def frozen_array(field: str, value: object, dtype: str) -> np.ndarray:
    """`value` as a read-only one-dimensional array; its dtype must already be `dtype`.

    Raises:
        TrajectoryError: not an array, or of another shape or dtype.
    """
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype != np.dtype(dtype):
        shown = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise TrajectoryError(field, shown, f"a one-dimensional numpy array of {dtype}")
    if not value.flags.writeable:
        return value
    copy = value.copy()
    copy.setflags(write=False)
    return copy


def check_length(field: str, array: np.ndarray, length: int) -> None:
    """Raise `TrajectoryError` unless `array` has `length` elements."""
    if len(array) != length:
        raise TrajectoryError(f"len({field})", len(array), f"{length}, the number of tokens")


def check_tokens(field: str, tokens: np.ndarray) -> None:
    """Raise `TrajectoryError` at the first negative token id."""
    _check_all(field, tokens, tokens >= 0, "token ids >= 0")


def check_logprobs(field: str, logprobs: np.ndarray, mask: np.ndarray) -> None:
    """Raise `TrajectoryError` unless finite and <= 0 where `mask`, exactly 0 elsewhere."""
    _check_all(
        field, logprobs, ~mask | (np.isfinite(logprobs) & (logprobs <= 0)), "finite and <= 0 where mask"
    )
    check_zero_outside(field, logprobs, mask)


def check_zero_outside(field: str, values: np.ndarray, mask: np.ndarray) -> None:
    """Raise `TrajectoryError` at the first value that is not 0 where `mask` is false."""
    _check_all(field, values, mask | (values == 0), "exactly 0 where mask is false")


def check_trajectory(trajectory: "Trajectory") -> None:
    """Check every invariant of a trajectory, its arrays being well typed already."""
    if not trajectory.trajectory_id:
        raise TrajectoryError("trajectory_id", trajectory.trajectory_id, "a non-empty string")
    for field in ("seed", "group", "member"):
        number = getattr(trajectory, field)
        if type(number) is not int or number not in _INT64:
            raise TrajectoryError(field, number, "an integer of 64 bits")
    length = len(trajectory.tokens_T)
    check_length("mask_T", trajectory.mask_T, length)
    check_length("logprobs_T", trajectory.logprobs_T, length)
    check_tokens("tokens_T", trajectory.tokens_T)
    check_logprobs("logprobs_T", trajectory.logprobs_T, trajectory.mask_T)
    _check_turns(trajectory, length)


def _check_turns(trajectory: "Trajectory", length: int) -> None:
    spans = np.zeros(length, dtype=bool)
    # The first token has no predecessor that could predict it, so no turn starts there.
    previous_end = 1
    for position, turn in enumerate(trajectory.turns):
        name = f"turns[{position}]"
        if turn.index != position:
            raise TrajectoryError(f"{name}.index", turn.index, f"{position}, its place")
        if not previous_end <= turn.start < turn.end <= length:
            raise TrajectoryError(
                f"{name}.[start, end)",
                (turn.start, turn.end),
                f"a non-empty span within [{previous_end}, {length})",
            )
        if turn.agent != trajectory.agent:
            raise TrajectoryError(f"{name}.agent", turn.agent, f"the trajectory's agent {trajectory.agent!r}")
        check_turn(name, turn, trajectory.logprobs_T[turn.start : turn.end])
        spans[turn.start : turn.end] = True
        previous_end = turn.end
    _check_all(
        "mask_T", trajectory.mask_T, trajectory.mask_T == spans, "true exactly inside the turns' spans"
    )


def check_turn(name: str, turn: "Turn", logprobs: np.ndarray) -> None:
    """Check a turn's version, its reward, and that a demonstration claims no logprobs."""
    if not isinstance(turn.version, str) or not _VERSION.match(turn.version):
        raise TrajectoryError(f"{name}.version", turn.version, f"policy@number, base or {DEMONSTRATION}")
    if turn.version == DEMONSTRATION and logprobs.any():
        raise TrajectoryError(f"{name} logprobs", logprobs.tolist(), "all 0 in a demonstration")
    if turn.reward is not None:
        check_reward(f"{name}.reward", turn.reward)


def check_reward(field: str, reward: float) -> None:
    """Raise `TrajectoryError` unless `reward` is a finite number."""
    if not math.isfinite(reward):
        raise TrajectoryError(field, reward, "a finite number, or None where missing")


def check_datum(datum: "Datum") -> None:
    """Check every invariant of a datum, its arrays being well typed already."""
    length, mask = len(datum.input_tokens_N), datum.mask_N
    for field in ("target_tokens_N", "mask_N", "weights_N", "advantages_N", "sampler_logprobs_N"):
        array = getattr(datum, field)
        if array is not None:
            check_length(field, array, length)
    if not mask.any():
        raise TrajectoryError("mask_N", int(mask.sum()), "at least one trained target")
    check_tokens("input_tokens_N", datum.input_tokens_N)
    check_tokens("target_tokens_N", datum.target_tokens_N)
    _check_all(
        "target_tokens_N",
        datum.target_tokens_N[:-1],
        datum.target_tokens_N[:-1] == datum.input_tokens_N[1:],
        "the inputs shifted by one",
    )
    _check_signal(datum)
    if not (math.isfinite(datum.temperature) and datum.temperature > 0):
        raise TrajectoryError(
            "temperature", datum.temperature, "> 0 (greedy samples have no logprobs to train on)"
        )
    if not 0 < datum.top_p <= 1:
        raise TrajectoryError("top_p", datum.top_p, "0 < top_p <= 1")
    if datum.top_k < 0:
        raise TrajectoryError("top_k", datum.top_k, ">= 0")
    if not 0 <= datum.min_p <= 1:
        raise TrajectoryError("min_p", datum.min_p, "0 <= min_p <= 1")


def _check_signal(datum: "Datum") -> None:
    signals = {"weights_N": datum.weights_N, "advantages_N": datum.advantages_N}
    given = [name for name, signal in signals.items() if signal is not None]
    if len(given) != 1:
        raise TrajectoryError("signal", given, "exactly one of weights_N and advantages_N")
    signal = signals[given[0]]
    assert signal is not None
    _check_all(given[0], signal, np.isfinite(signal), "finite numbers")
    check_zero_outside(given[0], signal, datum.mask_N)
    if datum.sampler_logprobs_N is not None:
        check_logprobs("sampler_logprobs_N", datum.sampler_logprobs_N, datum.mask_N)
    elif datum.advantages_N is not None:
        raise TrajectoryError(
            "sampler_logprobs_N", None, "the sampler's logprobs, where advantages are given"
        )


def _check_all(field: str, values: np.ndarray, holds: np.ndarray, accepted: str) -> None:
    if not holds.all():
        position = int(np.argmin(holds))
        raise TrajectoryError(f"{field}[{position}]", values[position].item(), accepted)
