"""The torch reference of the three LoRA operations: a loop over segments (Hu et al., arXiv:2106.09685).

Axes: T rows of a layer's input, P routed rows in sorted order, S slots, R rank, D features in or
out, G segments. Layers that share their input (q, k, v) are fused: `slices` are their widths, their
features lie side by side, and slice j of the features belongs to columns j*R to (j+1)*R of the rank
space. No slices means one of full width.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from opentinker_kernels.plan import RoutingPlan, Segment


def shrink(x_TD: Tensor, W_SRD: Tensor, plan: RoutingPlan, slices: tuple[int, ...] = ()) -> Tensor:
    """Project routed rows to the rank space, `u = x W[slot]^T`: (P, R), W's dtype, slices side by side."""
    rank = W_SRD.shape[1]
    u_PR = x_TD.new_empty(plan.n_routed, max(1, len(slices)) * rank, dtype=W_SRD.dtype)
    for segment in plan.segments:
        x_LD, W_RD = rows_of(x_TD, plan, segment).to(W_SRD.dtype), W_SRD[segment.slot]
        for features, ranks in sliced(W_RD.shape[1], rank, slices):
            u_PR[segment.start : segment.stop, ranks] = x_LD[:, features] @ W_RD[:, features].T
    return u_PR


def expand_add(
    y_TD: Tensor, u_PR: Tensor, W_SRD: Tensor, plan: RoutingPlan, slices: tuple[int, ...] = ()
) -> None:
    """Add `u W[slot]` to the routed rows of y, in place, rounded once; other rows keep every bit."""
    rank = W_SRD.shape[1]
    for segment in plan.segments:
        y_LD, W_RD = rows_of(y_TD, plan, segment), W_SRD[segment.slot]
        u_LR = u_PR[segment.start : segment.stop]
        for features, ranks in sliced(W_RD.shape[1], rank, slices):
            delta = u_LR[:, ranks] @ W_RD[:, features]
            y_LD[:, features] = (y_LD[:, features].to(delta.dtype) + delta).to(y_TD.dtype)
        if plan.rows is not None:  # y_LD is a copy then
            y_TD[plan.rows[segment.start : segment.stop]] = y_LD


def wgrad(u_PR: Tensor, x_TD: Tensor, plan: RoutingPlan, slices: tuple[int, ...] = ()) -> Tensor:
    """Gradient of a factor from each segment's rows, `u^T x`: float32 (G, R, D).

    Without slices R is all of u's columns; with them, those of one slice.
    """
    rank = u_PR.shape[1] // max(1, len(slices))
    g_GRD = x_TD.new_empty(len(plan.segments), rank, x_TD.shape[1], dtype=torch.float32)
    for g_RD, segment in zip(g_GRD, plan.segments, strict=True):
        x_LD, u_LR = rows_of(x_TD, plan, segment).float(), u_PR[segment.start : segment.stop].float()
        for features, ranks in sliced(x_TD.shape[1], rank, slices):
            g_RD[:, features] = u_LR[:, ranks].T @ x_LD[:, features]
    return g_GRD


def rows_of(x_TD: Tensor, plan: RoutingPlan, segment: Segment) -> Tensor:
    """The input rows of a segment, (L, D): a view where the rows are in order, else a copy."""
    if plan.rows is None:
        return x_TD[segment.start : segment.stop]
    return x_TD[plan.rows[segment.start : segment.stop]]


def sliced(width: int, rank: int, slices: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """(features, rank columns) of each slice."""
    first = 0
    for j, size in enumerate(slices or (width,)):
        yield slice(first, first + size), slice(j * rank, (j + 1) * rank)
        first += size
