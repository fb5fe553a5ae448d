"""From a trajectory to a datum: the shift by one, once and in one place.

`input_tokens = tokens[:-1]`, `target_tokens = tokens[1:]`, and every other array is indexed by target,
so the last prompt token predicts the first generated one. A trajectory of several turns stays one
datum; context after its last trained token is dropped, because nothing is predicted from it.
"""

from collections.abc import Collection, Sequence

import numpy as np

from opentinker_core.trajectories.errors import TrajectoryError
from opentinker_core.trajectories.types import DEMONSTRATION, Datum, Trajectory

Signal = float | Sequence[float] | np.ndarray
"""One number for the whole trajectory, or one a turn."""


def to_datum(
    trajectory: Trajectory,
    *,
    weights: Signal | None = None,
    advantages: Signal | None = None,
    without: Collection[int] = (),
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> Datum:
    """The datum of a trajectory, with either supervised `weights` or RL `advantages`.

    A turn of weight 0 is not trained and leaves the mask; a turn of advantage 0 stays in it, since
    where an episode happens to meet its baseline must not change a mean over tokens. `temperature`,
    `top_p`, `top_k` and `min_p` are how the tokens were sampled, which the trainer must repeat to compare
    logprobs.

    Args:
        without: indices of turns that are not trained, such as those with a call of a tool that could not
            be read. They leave the mask, and thereby every mean over tokens and every ratio of a
            sequence; their tokens stay what later turns were sampled after.

    Raises:
        TrajectoryError: both or none of the signals, not one a turn, no such turn, nothing to train, or
            advantages for a demonstration (whose sampler's logprobs do not exist).
    """
    if (weights is None) == (advantages is None):
        raise TrajectoryError("signal", [weights, advantages], "exactly one of weights and advantages")
    mask_T = _trained(trajectory, without)
    if weights is not None:
        signal_T = _per_token("weights", trajectory, weights)
        mask_T = mask_T & (signal_T != 0)
    else:
        assert advantages is not None
        _refuse_demonstrations(trajectory, without)
        signal_T = _per_token("advantages", trajectory, advantages)
    if not mask_T.any():
        raise TrajectoryError("trained tokens", 0, f"at least one in trajectory {trajectory.trajectory_id}")
    signal_T = np.where(mask_T, signal_T, np.float32(0))
    logprobs_T = np.where(mask_T, trajectory.logprobs_T, np.float32(0))
    end = int(np.flatnonzero(mask_T)[-1]) + 1
    return Datum(
        input_tokens_N=trajectory.tokens_T[: end - 1].astype(np.int64),
        target_tokens_N=trajectory.tokens_T[1:end].astype(np.int64),
        mask_N=mask_T[1:end],
        weights_N=signal_T[1:end] if weights is not None else None,
        advantages_N=signal_T[1:end] if advantages is not None else None,
        sampler_logprobs_N=logprobs_T[1:end] if advantages is not None else None,
        trajectory_id=trajectory.trajectory_id,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
    )


def _trained(trajectory: Trajectory, without: Collection[int]) -> np.ndarray:
    """bool (T,): the tokens that the agent generated, but for those of the turns `without`."""
    mask_T = trajectory.mask_T.copy()
    for index in without:
        if index not in range(len(trajectory.turns)):
            raise TrajectoryError("without", index, f"indices of the {len(trajectory.turns)} turns")
        turn = trajectory.turns[index]
        mask_T[turn.start : turn.end] = False
    return mask_T


def _per_token(field: str, trajectory: Trajectory, signal: Signal) -> np.ndarray:
    values = np.asarray(signal, dtype=np.float64)
    if values.ndim == 0:
        values = np.full(len(trajectory.turns), values)
    if values.shape != (len(trajectory.turns),):
        raise TrajectoryError(
            field, list(values.shape), f"a number, or one a turn ({len(trajectory.turns)} turns)"
        )
    signal_T = np.zeros(len(trajectory.tokens_T), dtype=np.float32)
    for turn, value in zip(trajectory.turns, values, strict=True):
        signal_T[turn.start : turn.end] = value
    return signal_T


def _refuse_demonstrations(trajectory: Trajectory, without: Collection[int]) -> None:
    for turn in trajectory.turns:
        if turn.version == DEMONSTRATION and turn.index not in without:
            raise TrajectoryError(
                f"turns[{turn.index}].version", turn.version, "sampled turns; demonstrations take weights"
            )
