"""Products of tiled plans on the CPU: a row gets the same bits whatever rows its adapter has besides.

In a product of one row, or of few, a row gets other bits than in one of many. So an adapter's rows are filled
up to `LEAST` at least, or two, four, ... times as many, with rows that nobody looks at: products of all these
heights give a row the same bits, which is tried. Adapters of one height are one batched product: 8 rows of
each of 8 adapters of 256 features take 11 microseconds at rank 8 (one AVX-512 core), rows on their own eight
calls of 6. Where many adapters have a row each, it takes a third longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, product

import torch
from torch import Tensor

from opentinker_kernels.plan import RoutingPlan, Segment
from opentinker_kernels.threads import one_thread

LEAST = 4
_SMALL = 1 << 17
"""Numbers in the factors of all segments from which on it pays to wake other threads."""
_TRIED = ((576, 8), (256, 24), (4096, 16), (8, 576), (16, 1536), (8, 64))
"""(inner, outer) of the products that are tried."""
_HEIGHTS = (4, 8, 32, 256)
"""Rows of a product that are tried."""


@dataclass(frozen=True, eq=False)
class _Run:
    """Segments of one height: one batched product."""

    places: slice
    """Where their rows are."""
    height: int
    count: int
    slots: slice | Tensor
    """A slice where they are consecutive, which spares a copy of the factors."""

    def times(self, x_PD: Tensor, W_SRD: Tensor, *, transposed: bool) -> Tensor:
        """The rows at these places times their factors."""
        W_nRD = W_SRD[self.slots] if isinstance(self.slots, slice) else W_SRD.index_select(0, self.slots)
        x_nLD = x_PD[self.places].view(self.count, self.height, x_PD.shape[1])
        return torch.bmm(x_nLD, W_nRD.transpose(1, 2) if transposed else W_nRD).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class Tiles:
    """How the rows of a plan are laid out for its products."""

    runs: tuple[_Run, ...]
    filled_with: Tensor | None
    """The row at each place; None: all rows in order, and no places are left over."""
    places_P: Tensor | None
    """The place of each row, if these are not in order."""

    @classmethod
    def of(cls, plan: RoutingPlan) -> "Tiles":
        """The layout for a plan; made once, then kept."""
        return plan.cached("tiles", lambda: _lay_out(plan))

    def times(self, x_PD: Tensor, W_SRD: Tensor, *, transposed: bool) -> Tensor:
        """Rows of the plan times their factors: (P, R) if these are transposed, else (P, D)."""
        if self.filled_with is not None:
            x_PD = x_PD.index_select(0, self.filled_with)
        with one_thread(sum(run.count for run in self.runs) * W_SRD[0].numel() < _SMALL):
            parts = [run.times(x_PD, W_SRD, transposed=transposed) for run in self.runs]
        y_PD = parts[0] if len(parts) == 1 else torch.cat(parts)
        return y_PD if self.places_P is None else y_PD.index_select(0, self.places_P)


def shrink(x_TD: Tensor, W_SRD: Tensor, plan: RoutingPlan) -> Tensor:
    """See `reference.shrink`."""
    return Tiles.of(plan).times(x_TD.to(W_SRD.dtype), W_SRD, transposed=True)


def expand_add(y_TD: Tensor, u_PR: Tensor, W_SRD: Tensor, plan: RoutingPlan) -> None:
    """See `reference.expand_add`."""
    y_TD[: plan.n_routed].add_(Tiles.of(plan).times(u_PR, W_SRD, transposed=False))


def are_invariant() -> bool:
    """Whether a row gets the same bits in products of all heights, on one thread too; tried once, quickly."""
    return _are_invariant(torch.get_num_threads())


@cache
def _are_invariant(threads: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    for inner, outer in _TRIED:
        x_K = torch.randn(inner, generator=generator)
        W_nRD = torch.randn((4, inner, outer) if inner < outer else (4, outer, inner), generator=generator)
        W_nKN = W_nRD if inner < outer else W_nRD.transpose(1, 2)
        seen: list[Tensor] = []
        for height, count in product(_HEIGHTS, (1, 4)):
            rows = [0, 1, height // 2, height - 1]
            x_nLK = torch.randn(count, height, inner, generator=generator)
            x_nLK[-1, rows] = x_K
            for small in {True, threads == 1}:
                with one_thread(small):
                    seen += torch.bmm(x_nLK, W_nKN[-count:])[-1, rows].unbind()
        if not all(torch.equal(one, seen[0]) for one in seen):
            return False
    return True


def height_for(rows: int) -> int:
    """Rows of the product for so many of an adapter."""
    height = LEAST
    while height < rows:
        height *= 2
    return height


def _lay_out(plan: RoutingPlan) -> Tiles:
    runs: list[_Run] = []
    rows: list[int] = []
    ordered = sorted(plan.segments, key=lambda segment: height_for(segment.length))
    for height, members in groupby(ordered, key=lambda segment: height_for(segment.length)):
        own = list(members)
        first = len(rows)
        rows += [min(row, one.stop - 1) for one in own for row in range(one.start, one.start + height)]
        runs.append(_Run(slice(first, len(rows)), height, len(own), _slots(own)))
    if rows == list(range(plan.n_routed)):
        return Tiles(tuple(runs), None, None)
    place_of = {row: place for place, row in reversed(list(enumerate(rows)))}
    places = torch.tensor([place_of[row] for row in range(plan.n_routed)])
    return Tiles(tuple(runs), torch.tensor(rows), places)


def _slots(segments: Sequence[Segment]) -> slice | Tensor:
    slots = [segment.slot for segment in segments]
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return torch.tensor(slots)
