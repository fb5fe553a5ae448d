"""The three LoRA operations on the CPU, by the fastest way for the shape; see `reference` for what they do.

Runs of segments of one length are one batched product, others a loop over runs: for 8 segments of one row
of 576 features a batched product takes 30 microseconds and a loop 71; for 64 of one row of 64 features 30
and 464 (two AVX2 cores, float32, rank 8). `grouped_mm` is slower at these sizes, and wants aligned ranks.
Where a row's bits must not depend on how many rows its adapter has, the plan is tiled (see `tiles`), or each
row is a segment of its own: many of one adapter are a batched product then, of one matrix that is repeated
without a copy, and many of each of many adapters a loop.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from opentinker_kernels import tiles
from opentinker_kernels.plan import RoutingPlan, Segment
from opentinker_kernels.reference import sliced
from opentinker_kernels.threads import one_thread

_SMALL = 1 << 17
"""Numbers in the factors of a step from which on it pays to wake other threads for single rows: 8 rows of 8
adapters of 576 features at rank 8 take 5 microseconds on one thread, 43 on two that sleep in between."""


def _threads_for(plan: RoutingPlan, W_SRD: Tensor) -> AbstractContextManager[None]:
    """One thread for small products of single rows. Larger matrices get other bits from other threads."""
    return one_thread(torch.get_num_threads() > 1 and _single_rows(plan) * W_SRD[0].numel() < _SMALL)


@dataclass(frozen=True, eq=False)
class _Run:
    """Consecutive segments of one length: a batch of equal matrices."""

    rows: slice
    """In sorted order."""
    n: int
    length: int
    segments: slice
    slots: slice | Tensor
    """Their slots: a slice where these are consecutive or one, which spares a copy of the factors."""

    def factors(self, W_SRD: Tensor) -> Tensor:
        """The factors of each, (n, R, D)."""
        W_nRD = W_SRD[self.slots]
        return W_nRD if len(W_nRD) == self.n else W_nRD.expand(self.n, -1, -1)

    def batched(self, tensor_PD: Tensor) -> Tensor:
        """Its rows of a tensor in sorted order, (n, length, D)."""
        return tensor_PD[self.rows].view(self.n, self.length, tensor_PD.shape[1])


def shrink(x_TD: Tensor, W_SRD: Tensor, plan: RoutingPlan, slices: tuple[int, ...] = ()) -> Tensor:
    """See `reference.shrink`."""
    if _is_tiled(plan, slices):
        return tiles.shrink(x_TD, W_SRD, plan)
    with _threads_for(plan, W_SRD):
        return _shrink(x_TD, W_SRD, plan, slices)


def expand_add(
    y_TD: Tensor, u_PR: Tensor, W_SRD: Tensor, plan: RoutingPlan, slices: tuple[int, ...] = ()
) -> None:
    """See `reference.expand_add`."""
    if _is_tiled(plan, slices):
        tiles.expand_add(y_TD, u_PR, W_SRD, plan)
        return
    with _threads_for(plan, W_SRD):
        _expand_add(y_TD, u_PR, W_SRD, plan, slices)


def _shrink(x_TD: Tensor, W_SRD: Tensor, plan: RoutingPlan, slices: tuple[int, ...]) -> Tensor:
    if (run := _only_run(plan)) and not slices:
        x_nLD = run.batched(x_TD).to(W_SRD.dtype)
        return torch.bmm(x_nLD, run.factors(W_SRD).transpose(1, 2)).flatten(0, 1)
    rank = W_SRD.shape[1]
    x_PD = _sorted(x_TD, plan).to(W_SRD.dtype)
    u_PR = x_PD.new_empty(plan.n_routed, max(1, len(slices)) * rank)
    for run in _runs(plan):
        x_nLD, W_nRD, u_nLR = run.batched(x_PD), run.factors(W_SRD), run.batched(u_PR)
        if not slices:
            torch.bmm(x_nLD, W_nRD.transpose(1, 2), out=u_nLR)
            continue
        for features, ranks in sliced(W_SRD.shape[2], rank, slices):
            u_nLR[:, :, ranks] = torch.bmm(x_nLD[:, :, features], W_nRD[:, :, features].transpose(1, 2))
    return u_PR


def _expand_add(
    y_TD: Tensor, u_PR: Tensor, W_SRD: Tensor, plan: RoutingPlan, slices: tuple[int, ...]
) -> None:
    if (run := _only_run(plan)) and not slices and y_TD.dtype == W_SRD.dtype:
        run.batched(y_TD).baddbmm_(run.batched(u_PR), run.factors(W_SRD))
        return
    if not plan.segments:
        return
    y_PD = _sorted(y_TD, plan)
    if y_PD.dtype != W_SRD.dtype:
        y_PD = y_PD.to(W_SRD.dtype)
    for run in _runs(plan):
        y_nLD, u_nLR, W_nRD = run.batched(y_PD), run.batched(u_PR), run.factors(W_SRD)
        if not slices:
            y_nLD.baddbmm_(u_nLR, W_nRD)
            continue
        for features, ranks in sliced(W_SRD.shape[2], W_SRD.shape[1], slices):
            y_nLD[:, :, features].baddbmm_(u_nLR[:, :, ranks], W_nRD[:, :, features])
    if plan.rows is not None:
        y_TD[plan.rows] = y_PD.to(y_TD.dtype)
    elif y_TD.dtype != W_SRD.dtype:
        y_TD[: plan.n_routed] = y_PD.to(y_TD.dtype)


def wgrad(u_PR: Tensor, x_TD: Tensor, plan: RoutingPlan, slices: tuple[int, ...] = ()) -> Tensor:
    """See `reference.wgrad`; float64 for float64 factors."""
    dtype = torch.promote_types(u_PR.dtype, torch.float32)
    x_PD, u_PR = _sorted(x_TD, plan).to(dtype), u_PR.to(dtype)
    rank = u_PR.shape[1] // max(1, len(slices))
    g_GRD = x_PD.new_empty(len(plan.segments), rank, x_TD.shape[1])
    for run in _runs(plan):
        x_nLD, u_nLR, g_nRD = run.batched(x_PD), run.batched(u_PR), g_GRD[run.segments]
        if not slices:
            torch.bmm(u_nLR.transpose(1, 2), x_nLD, out=g_nRD)
            continue
        for features, ranks in sliced(x_TD.shape[1], rank, slices):
            g_nRD[:, :, features] = torch.bmm(u_nLR[:, :, ranks].transpose(1, 2), x_nLD[:, :, features])
    return g_GRD


def _is_tiled(plan: RoutingPlan, slices: tuple[int, ...]) -> bool:
    if plan.tiled and slices:
        raise ValueError(f"slices: {slices} of a tiled plan; accepted: ()")
    return plan.tiled and bool(plan.segments)


def _sorted(x_TD: Tensor, plan: RoutingPlan) -> Tensor:
    return x_TD[: plan.n_routed] if plan.rows is None else x_TD[plan.rows]


def _only_run(plan: RoutingPlan) -> _Run | None:
    """The one run that is all there is to do, as in decoding when every sequence has its own adapter."""
    if plan.rows is not None or not plan.segments:
        return None
    runs = _runs(plan)
    return runs[0] if len(runs) == 1 else None


def _runs(plan: RoutingPlan) -> list[_Run]:
    return plan.cached("runs", lambda: _find_runs(plan))


def _single_rows(plan: RoutingPlan) -> float:
    """Different slots of a plan whose segments are single rows; else infinity."""

    def count() -> float:
        single = all(run.length == 1 for run in _runs(plan))  # they are found here, with all threads
        return len(set(plan.slots)) if single else math.inf

    return plan.cached("single", count)


def _find_runs(plan: RoutingPlan) -> list[_Run]:
    runs, first = [], 0
    segments = plan.segments
    together = not plan.invariant or _batches_are_invariant()
    for index in range(1, len(segments) + 1):
        if together and index < len(segments) and _continues(segments, first, index):
            continue
        members = segments[first:index]
        rows = slice(members[0].start, members[-1].stop)
        slots = _as_slice([segment.slot for segment in members])
        runs.append(_Run(rows, len(members), members[0].length, slice(first, index), slots))
        first = index
    return runs


def _batches_are_invariant() -> bool:
    return _are_invariant(torch.get_num_threads())


@cache
def _are_invariant(threads: int) -> bool:
    """Whether a matrix of a batched product gets the same bits alone, a row on one thread too; tried once."""
    generator = torch.Generator().manual_seed(0)
    for length, inner, outer in _TRIED:
        shapes = ((4, length, inner), (4, inner, outer), (4, length, outer))
        case = [torch.randn(shape, generator=generator) for shape in shapes]
        together = _products(*case)
        for number in {threads, 1} if length == 1 else {threads}:
            torch.set_num_threads(number)
            alone = [_products(*(tensor[i : i + 1] for tensor in case)) for i in range(4)]
            torch.set_num_threads(threads)
            if not all(
                torch.equal(a[0], b[i])
                for i, pair in enumerate(alone)
                for a, b in zip(pair, together, strict=True)
            ):
                return False
    return True


_TRIED = ((8, 576, 8), (64, 64, 24), (128, 8, 576), (40, 1536, 16), (1, 576, 8), (1, 16, 576))
"""(rows, inner, outer) of the products that are tried."""


def _products(left: Tensor, right: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.bmm(left, right), torch.bmm(left.transpose(1, 2), weight)


def _continues(segments: Sequence[Segment], first: int, index: int) -> bool:
    """Whether a segment joins the run before it: of one length, and slots that are all the same or none twice
    in a row (of which each row of a decoding policy, and the rows of many policies, are the cases)."""
    before, own = segments[index - 1], segments[index]
    if own.length != before.length:
        return False
    return index - first == 1 or (own.slot == before.slot) == (before.slot == segments[index - 2].slot)


def _as_slice(slots: list[int]) -> slice | Tensor:
    if len(set(slots)) == 1:
        return slice(slots[0], slots[0] + 1)
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return torch.tensor(slots)
