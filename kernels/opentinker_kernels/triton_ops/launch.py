"""Launches the Triton kernels; `opentinker_kernels.reference` says what the operations compute.

Inputs may be views: rows of any stride, slots of an arena. Blocks of rows come from the plan, which
keeps them on the device: once it has them, nothing here waits for the device.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from opentinker_kernels.plan import Blocks, RoutingPlan
from opentinker_kernels.triton_ops.checks import check_factor, check_output, check_ranks, checked_widths
from opentinker_kernels.triton_ops.tiles import (
    INVARIANT_ROWS,
    SUM_TILE,
    Tiles,
    ceil_div,
    expand_tiles,
    shrink_tiles,
    wgrad_chunk,
    wgrad_tiles,
)


def available() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def shrink(x_TD: Tensor, W_SRD: Tensor, plan: RoutingPlan, slices: tuple[int, ...] = ()) -> Tensor:
    """Project routed rows to the rank space: (P, R) or (P, len(slices) * R), summed in float32, dtype of W.

    Raises:
        ValueError: Shapes, types or devices do not fit.
        ModuleNotFoundError: Triton is not installed.
    """
    widths = checked_widths("x_TD", x_TD, plan, slices)
    check_factor(W_SRD, x_TD, plan)
    rank = W_SRD.shape[1]
    u_PR = x_TD.new_empty(plan.n_routed, len(widths) * rank, dtype=W_SRD.dtype)
    if not plan.n_routed:
        return u_PR
    x_TD = _adjacent(x_TD)
    tiles = shrink_tiles(_n_rows(plan), max(widths), rank, W_SRD.element_size())
    sums_PR = u_PR if tiles.split == 1 else u_PR.new_empty(tiles.split, *u_PR.shape, dtype=torch.float32)
    blocks = plan.blocks(tiles.rows, device=x_TD.device)
    kernels = _kernels()
    with _device(x_TD):
        kernels.shrink_kernel[len(blocks.slot_B), len(widths) * ceil_div(rank, tiles.rank), tiles.split](
            *(x_TD, W_SRD, sums_PR),
            *_rows(plan, blocks),
            *(x_TD.stride(0), W_SRD.stride(0), W_SRD.stride(1), u_PR.numel(), u_PR.stride(0)),
            COLUMNS=_offsets(widths),
            SPLIT=tiles.split,
            **_constants(plan, tiles, rank, W_SRD.dtype),
        )
        if tiles.split > 1:
            n = u_PR.numel()
            kernels.sum_planes_kernel[(ceil_div(n, SUM_TILE),)](
                sums_PR, u_PR, n, SPLIT=tiles.split, BLOCK=SUM_TILE
            )
    return u_PR


def expand_add(
    y_TD: Tensor, u_PR: Tensor, W_SRD: Tensor, plan: RoutingPlan, slices: tuple[int, ...] = ()
) -> None:
    """Add `u W[slot]` to the routed rows of y in place, in float32, rounded once; otherwise as `shrink`."""
    widths = checked_widths("y_TD", y_TD, plan, slices)
    check_factor(W_SRD, y_TD, plan)
    rank = W_SRD.shape[1]
    check_ranks(u_PR, y_TD, plan, rank, len(widths))
    check_output(y_TD)
    if not plan.n_routed:
        return
    u_PR = _adjacent(u_PR)
    tiles = expand_tiles(_n_rows(plan), rank, W_SRD.element_size())
    feature_tiles = _offsets(ceil_div(width, tiles.features) for width in widths)
    blocks = plan.blocks(tiles.rows, device=y_TD.device)
    with _device(y_TD):
        _kernels().expand_kernel[len(blocks.slot_B), feature_tiles[-1]](
            *(y_TD, u_PR, W_SRD),
            *_rows(plan, blocks),
            *(y_TD.stride(0), u_PR.stride(0), W_SRD.stride(0), W_SRD.stride(1)),
            COLUMNS=_offsets(widths),
            TILES=feature_tiles,
            **_constants(plan, tiles, rank, W_SRD.dtype),
        )


def wgrad(u_PR: Tensor, x_TD: Tensor, plan: RoutingPlan, slices: tuple[int, ...] = ()) -> Tensor:
    """Gradient of a factor from each segment's rows, `u^T x`: float32 (G, R, D), R that of one slice.

    It is invariant always. Raises as `shrink`.
    """
    widths = checked_widths("x_TD", x_TD, plan, slices)
    rank = u_PR.shape[1] // len(widths)
    check_ranks(u_PR, x_TD, plan, rank, len(widths))
    g_GRD = x_TD.new_empty(len(plan.segments), rank, x_TD.shape[1], dtype=torch.float32)
    if not plan.n_routed:
        return g_GRD
    u_PR, x_TD = _adjacent(u_PR), _adjacent(x_TD)
    dtype = u_PR.dtype if u_PR.dtype == x_TD.dtype else torch.float32
    tiles = wgrad_tiles(rank, dtype.itemsize)
    feature_tiles = _offsets(ceil_div(width, tiles.features) for width in widths)
    rank_tiles = ceil_div(rank, tiles.rank)
    blocks = plan.blocks(wgrad_chunk(feature_tiles[-1] * rank_tiles), device=x_TD.device)
    n_blocks, n = len(blocks.slot_B), rank * x_TD.shape[1]
    sums_BRD = g_GRD if n_blocks == len(g_GRD) else g_GRD.new_empty(n_blocks, *g_GRD.shape[1:])
    kernels = _kernels()
    with _device(x_TD):
        kernels.wgrad_kernel[n_blocks, feature_tiles[-1], rank_tiles](
            *(u_PR, x_TD, sums_BRD),
            *_rows(plan, blocks),
            *(u_PR.stride(0), x_TD.stride(0), g_GRD.stride(0), g_GRD.stride(1)),
            COLUMNS=_offsets(widths),
            TILES=feature_tiles,
            **_constants(plan, tiles, rank, dtype),
        )
        if n_blocks > len(g_GRD):
            kernels.sum_blocks_kernel[len(g_GRD), ceil_div(n, SUM_TILE)](
                sums_BRD, g_GRD, blocks.segment_B, n_blocks, n, BLOCK=SUM_TILE
            )
    return g_GRD


@cache
def _kernels() -> Any:
    """The module of the kernels, imported on first use."""
    if not available():
        raise ModuleNotFoundError(
            "triton is not installed (it exists for Linux: pip install triton); "
            "opentinker_kernels.reference does the same without it"
        )
    return import_module("opentinker_kernels.triton_ops.kernels")


def _device(x_TD: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if x_TD.is_cuda:
        return torch.cuda.device(x_TD.device)
    if not _kernels().INTERPRETED:
        raise ValueError(f"device: {x_TD.device}; accepted: a CUDA or ROCm device")
    return nullcontext()


def _n_rows(plan: RoutingPlan) -> int:
    """Rows for which tiles are chosen."""
    return INVARIANT_ROWS if plan.invariant else plan.n_rows


def _rows(plan: RoutingPlan, blocks: Blocks) -> tuple[Tensor, ...]:
    """Arguments of every kernel; without a permutation the first is not read."""
    rows = blocks.slot_B if plan.rows is None else plan.rows
    return rows, blocks.slot_B, blocks.start_B, blocks.length_B


def _constants(plan: RoutingPlan, tiles: Tiles, rank: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "RANK": rank,
        "PERMUTED": plan.rows is not None,
        "BLOCK_ROWS": tiles.rows,
        "BLOCK_RANK": tiles.rank,
        "BLOCK_FEATURES": tiles.features,
        "DOT_DTYPE": _kernels().DOT_DTYPES[dtype],
    }


def _offsets(widths: Iterable[int]) -> tuple[int, ...]:
    return (0, *accumulate(widths))


def _adjacent(x_TD: Tensor) -> Tensor:
    """x with rows whose elements are adjacent: itself, or a copy."""
    return x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
