"""ClientDatum: a datum whose targets and signal a client of the service chose.

Axes: N positions of a datum, K targets a position.
"""

from dataclasses import dataclass

import numpy as np

from opentinker_core.trajectories.checks import check_length, check_tokens, frozen_array
from opentinker_core.trajectories.errors import TrajectoryError
from opentinker_core.trajectories.types import Datum

_LEAST_SHARED = 16
"""Inputs that datums must have in common to share them: fewer do not pay for a dense attention mask."""


@dataclass(frozen=True, eq=False)
class ClientDatum(Datum):
    """A datum that need not come from a trajectory.

    Targets need not be the inputs shifted, and a position may have several: `target_tokens_N` is (N,) or
    (N, K), and `weights_N` then has that shape too. Every position is in the mask, since clients get all
    logprobs. Logprobs are those of temperature 1.

    Raises:
        TrajectoryError: an array has another dtype or shape, or holds what is not finite.
    """

    ratio_low_N: np.ndarray | None = None
    """float32: lower bound of each token's ratio."""
    ratio_high_N: np.ndarray | None = None
    """float32: upper bound, which may be infinite."""
    sequence_mask_N: np.ndarray | None = None
    """float32: how much each token counts in the ratio of its sequence."""

    def __post_init__(self) -> None:
        length = len(self.input_tokens_N)
        shape = self.target_tokens_N.shape
        if len(shape) not in (1, 2) or shape[0] != length or 0 in shape:
            raise TrajectoryError("target_tokens_N.shape", shape, f"({length},) or ({length}, K), not empty")
        self._freeze("input_tokens_N", "int64", (length,))
        self._freeze("target_tokens_N", "int64", shape)
        self._freeze("mask_N", "bool", (length,))
        check_length("mask_N", self.mask_N[self.mask_N], length)
        check_tokens("input_tokens_N", self.input_tokens_N)
        check_tokens("target_tokens_N", self.target_tokens_N.reshape(-1))
        if (self.weights_N is None) == (self.advantages_N is None):
            raise TrajectoryError("signal", None, "exactly one of weights_N and advantages_N")
        self._freeze("weights_N", "float32", shape)
        self._freeze("advantages_N", "float32", shape)
        for name in ("sampler_logprobs_N", "ratio_low_N", "ratio_high_N", "sequence_mask_N"):
            self._freeze(name, "float32", (length,))

    @property
    def shared_inputs(self) -> np.ndarray:
        """The inputs before and including the first position with a signal, unless they are few."""
        has_signal_N = (self.signal.reshape(len(self), -1) != 0).any(axis=1)
        shared = int(np.argmax(has_signal_N)) + 1
        return self.input_tokens_N[: shared if shared >= _LEAST_SHARED else 0]

    def _freeze(self, field: str, dtype: str, shape: tuple[int, ...]) -> None:
        value = getattr(self, field)
        if value is None and field not in ("input_tokens_N", "target_tokens_N", "mask_N"):
            return
        if not isinstance(value, np.ndarray) or value.shape != shape:
            raise TrajectoryError(f"{field}.shape", getattr(value, "shape", None), str(shape))
        flat = frozen_array(field, value.reshape(-1), dtype)
        if dtype == "float32" and field != "ratio_high_N" and not np.isfinite(flat).all():
            raise TrajectoryError(field, "a number that is not finite", "finite numbers")
        object.__setattr__(self, field, flat.reshape(shape))
