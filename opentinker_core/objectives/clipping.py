"""The clipped surrogate of a ratio, with bounds that may differ by token.

Axes: M trained positions of a micro-batch.
"""

import torch
from torch import Tensor

from opentinker_core.objectives.types import SignalBatch

Bounds = tuple[float | Tensor, float | Tensor]
"""The least and the largest ratio, of all tokens or of each (M,)."""


def ratio_bounds(batch: SignalBatch, low: float, high: float) -> Bounds:
    """The batch's own bounds of each token where it has them, else `low` and `high`."""
    return (
        low if batch.ratio_low_M is None else batch.ratio_low_M,
        high if batch.ratio_high_M is None else batch.ratio_high_M,
    )


def clipped(ratio_M: Tensor, bounds: Bounds) -> Tensor:
    """The ratio within its bounds; its gradient is 0 beyond them."""
    low, high = (torch.as_tensor(bound, dtype=ratio_M.dtype, device=ratio_M.device) for bound in bounds)
    return ratio_M.clamp(low, high)


def clipped_surrogate(ratio_M: Tensor, advantages_M: Tensor, bounds: Bounds) -> Tensor:
    """`min(r A, clip(r) A)` of each token."""
    return torch.minimum(ratio_M * advantages_M, clipped(ratio_M, bounds) * advantages_M)


@torch.no_grad()
def clipped_tokens(ratio_M: Tensor, advantages_M: Tensor, bounds: Bounds) -> Tensor:
    """How many tokens have no gradient because of the bounds."""
    low, high = bounds
    too_high_M = (ratio_M > high) & (advantages_M > 0)
    too_low_M = (ratio_M < low) & (advantages_M < 0)
    return (too_high_M | too_low_M).sum().to(ratio_M.dtype)
