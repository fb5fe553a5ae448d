"""LoRA problems in which whatever must not be read is NaN, and whatever must not be written is watched."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opentinker_kernels import reference
from opentinker_kernels.plan import NO_SLOT, RoutingPlan

N_SLOTS = 5


@dataclass(frozen=True, eq=False)
class Problem:
    """One fused group of layers: K inputs, slices of outputs, slots of rank R."""

    slots: tuple[int, ...]
    plan: RoutingPlan
    slices: tuple[int, ...]
    x_TK: Tensor
    y_TN: Tensor
    A_SRK: Tensor
    """(slots, slices * R, K)"""
    Bt_SRN: Tensor
    dy_TN: Tensor

    @property
    def routed(self) -> Tensor:
        """Which rows have an adapter."""
        return torch.tensor(self.slots) != NO_SLOT

    def in_double(self) -> "Problem":
        """The same in float64: what results are compared with."""
        tensors = (self.x_TK, self.y_TN, self.A_SRK, self.Bt_SRN, self.dy_TN)
        x, y, A, Bt, dy = (tensor.double() for tensor in tensors)
        return Problem(self.slots, self.plan, self.slices, x, y, A, Bt, dy)


def make_problem(
    slots: Sequence[int],
    *,
    rank: int = 16,
    n_in: int = 96,
    slices: tuple[int, ...] = (80,),
    dtype: torch.dtype = torch.float32,
    ranks: Sequence[int] | None = None,
    invariant: bool = True,
    seed: int = 0,
) -> Problem:
    """A problem for rows of the given slots; `ranks` are the slots' own, at most `rank`, the rest is zero."""
    draw = torch.Generator().manual_seed(seed)
    routed = torch.tensor(slots) != NO_SLOT
    own = [rank] * N_SLOTS if ranks is None else ranks
    A_SRK = factors(len(slices) * rank, n_in, dtype, draw, set(slots))
    Bt_SRN = factors(rank, sum(slices), dtype, draw, set(slots))
    for slot in range(N_SLOTS):
        A_SRK[slot].unflatten(0, (len(slices), rank))[:, own[slot] :] *= 0
        Bt_SRN[slot, own[slot] :] *= 0
    x, dy = (activations(len(slots), width, dtype, draw, routed) for width in (n_in, sum(slices)))
    y = activations(len(slots), sum(slices), dtype, draw, routed)
    plan = replace(RoutingPlan.of(slots), invariant=invariant)
    return Problem(tuple(slots), plan, slices, x, y, A_SRK, Bt_SRN, dy)


def factors(rank: int, width: int, dtype: torch.dtype, draw: torch.Generator, used: set[int]) -> Tensor:
    """Factors as views of an arena: NaN between the slots, and in slots that no row uses."""
    arena = torch.full((N_SLOTS, rank * width + 24), torch.nan, dtype=dtype)
    W_SRD = arena[:, 8 : 8 + rank * width].unflatten(1, (rank, width))
    for slot in used - {NO_SLOT}:
        W_SRD[slot] = torch.randn(rank, width, generator=draw) / max(rank, width) ** 0.5
    return W_SRD


def activations(n_rows: int, width: int, dtype: torch.dtype, draw: torch.Generator, routed: Tensor) -> Tensor:
    """Rows as views of wider ones: NaN around them, and in rows without an adapter."""
    x_TD = torch.full((n_rows, width + 5), torch.nan, dtype=dtype)[:, 2 : 2 + width]
    x_TD[routed] = torch.randn(n_rows, width, generator=draw)[routed].to(dtype)
    return x_TD


def bits(tensor: Tensor) -> Tensor:
    """Its bit pattern: NaNs compare too."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def watched(y_TD: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of rows that lie in wider ones, and the whole memory they lie in."""
    memory = y_TD._base.clone() if y_TD._base is not None else y_TD.clone()
    return memory.as_strided(y_TD.shape, y_TD.stride(), y_TD.storage_offset()), memory


__all__ = ["N_SLOTS", "Problem", "bits", "make_problem", "reference", "watched"]
