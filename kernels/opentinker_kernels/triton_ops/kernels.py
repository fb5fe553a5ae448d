"""The Triton kernels: shrink, expand, wgrad, and the ordered sums of their partial results.

A program works on one block of rows, all of one segment, hence of one adapter slot. Sums run in one
fixed order and nothing is atomic, so a result depends on its own rows and on the tile sizes alone.

Arguments in capitals are compile-time constants. A *block table* holds one block of rows an entry:
its slot, first sorted position and number of rows (see `opentinker_kernels.plan.Blocks`). `COLUMNS`
and `TILES` describe fused slices: slice j of the features is COLUMNS[j] to COLUMNS[j + 1], and its
feature tiles are numbered from TILES[j] on. Offsets of rows and slots are 64-bit: an arena of
adapters has more than 2^31 elements.
"""

import torch
import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on the CPU, for tests: TRITON_INTERPRET=1."""
DOT_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.float32 if INTERPRETED else tl.bfloat16,  # the interpreter multiplies bfloat16 wrongly
}
"""In which type operands are multiplied; products are always added up in float32."""


@triton.jit
def shrink_kernel(
    x,
    w,
    u,
    rows,
    slot_B,
    start_B,
    length_B,
    x_row_stride,
    w_slot_stride,
    w_rank_stride,
    u_plane_stride,
    u_row_stride,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    PERMUTED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """u[plane, position, slice j, rank] = sum over part `plane` of slice j of x[row, :] * w[slot, rank, :].

    Grid: (blocks, slices x rank tiles, SPLIT). Each of the SPLIT parts of the features has a plane of
    its own in u.
    """
    block = tl.program_id(0)
    slot = tl.load(slot_B + block).to(tl.int64)
    if slot < 0:
        return
    rank_tiles: tl.constexpr = (RANK + BLOCK_RANK - 1) // BLOCK_RANK
    slice_index = tl.program_id(1) // rank_tiles
    rank = (tl.program_id(1) % rank_tiles) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    first, stop = _columns(slice_index, COLUMNS)
    if SPLIT > 1:  # parts are whole tiles, so that they begin where loads are aligned
        part = tl.cdiv(tl.cdiv(stop - first, BLOCK_FEATURES), SPLIT) * BLOCK_FEATURES
        first += tl.program_id(2) * part
        stop = tl.minimum(first + part, stop)
    position, row, used = _block_rows(rows, start_B, length_B, block, PERMUTED, BLOCK_ROWS)

    feature = tl.arange(0, BLOCK_FEATURES)
    x_tile = x + row[:, None] * x_row_stride + feature[None, :]
    w_tile = w + slot * w_slot_stride + rank[:, None] * w_rank_stride + feature[None, :]
    acc = tl.zeros((BLOCK_ROWS, BLOCK_RANK), tl.float32)
    for k in range(first, stop, BLOCK_FEATURES):
        inside = (k + feature < stop)[None, :]
        x_block = tl.load(x_tile + k, used[:, None] & inside, other=0.0)
        w_block = tl.load(w_tile + k, (rank < RANK)[:, None] & inside, other=0.0)
        acc = _dot(x_block, tl.trans(w_block), acc, DOT_DTYPE)

    u_tile = u + tl.program_id(2).to(tl.int64) * u_plane_stride + position[:, None] * u_row_stride
    u_tile += (slice_index * RANK + rank)[None, :]
    tl.store(u_tile, acc.to(u.dtype.element_ty), used[:, None] & (rank < RANK)[None, :])


@triton.jit
def expand_kernel(
    y,
    u,
    w,
    rows,
    slot_B,
    start_B,
    length_B,
    y_row_stride,
    u_row_stride,
    w_slot_stride,
    w_rank_stride,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    RANK: tl.constexpr,
    PERMUTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """y[row, n] += sum over rank of u[position, slice of n, rank] * w[slot, rank, n], rounded once.

    Grid: (blocks, feature tiles of all slices).
    """
    block = tl.program_id(0)
    slot = tl.load(slot_B + block).to(tl.int64)
    if slot < 0:
        return
    slice_index, feature, inside = _feature_tile(tl.program_id(1), COLUMNS, TILES, BLOCK_FEATURES)
    position, row, used = _block_rows(rows, start_B, length_B, block, PERMUTED, BLOCK_ROWS)
    owned = used[:, None] & inside[None, :]
    y_tile = y + row[:, None] * y_row_stride + feature[None, :]
    before = tl.load(y_tile, owned, other=0.0)  # asked for before the products, which hide its latency

    rank = tl.arange(0, BLOCK_RANK)
    u_tile = u + position[:, None] * u_row_stride + (slice_index * RANK + rank)[None, :]
    w_tile = w + slot * w_slot_stride + rank[:, None] * w_rank_stride + feature[None, :]
    acc = tl.zeros((BLOCK_ROWS, BLOCK_FEATURES), tl.float32)
    for r in range(0, RANK, BLOCK_RANK):
        exists = r + rank < RANK
        u_block = tl.load(u_tile + r, used[:, None] & exists[None, :], other=0.0)
        w_block = tl.load(w_tile + r * w_rank_stride, exists[:, None] & inside[None, :], other=0.0)
        acc = _dot(u_block, w_block, acc, DOT_DTYPE)
    tl.store(y_tile, (before.to(tl.float32) + acc).to(y.dtype.element_ty), owned)


@triton.jit
def wgrad_kernel(
    u,
    x,
    g,
    rows,
    slot_B,
    start_B,
    length_B,
    u_row_stride,
    x_row_stride,
    g_block_stride,
    g_rank_stride,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    RANK: tl.constexpr,
    PERMUTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """g[block, rank, d] = sum over the block's rows of u[position, slice of d, rank] * x[row, d].

    Grid: (blocks, feature tiles of all slices, rank tiles). A block is as long as the launcher likes;
    its rows are taken BLOCK_ROWS at a time.
    """
    block = tl.program_id(0)
    if tl.load(slot_B + block) < 0:
        return
    start = tl.load(start_B + block)
    length = tl.load(length_B + block)
    slice_index, feature, inside = _feature_tile(tl.program_id(1), COLUMNS, TILES, BLOCK_FEATURES)
    rank = tl.program_id(2) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    u_tile = u + (slice_index * RANK + rank)[None, :]
    x_tile = x + feature[None, :]
    acc = tl.zeros((BLOCK_RANK, BLOCK_FEATURES), tl.float32)
    for t in range(0, length, BLOCK_ROWS):
        offset = t + tl.arange(0, BLOCK_ROWS)
        used = offset < length
        position = (start + offset).to(tl.int64)
        row = _input_row(rows, position, used, PERMUTED)
        u_block = tl.load(
            u_tile + position[:, None] * u_row_stride, used[:, None] & (rank < RANK)[None, :], other=0.0
        )
        x_block = tl.load(x_tile + row[:, None] * x_row_stride, used[:, None] & inside[None, :], other=0.0)
        acc = _dot(tl.trans(u_block), x_block, acc, DOT_DTYPE)
    g_tile = g + block.to(tl.int64) * g_block_stride + rank[:, None] * g_rank_stride + feature[None, :]
    tl.store(g_tile, acc, (rank < RANK)[:, None] & inside[None, :])


@triton.jit
def sum_planes_kernel(planes, out, n, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = planes[0, i] + planes[1, i] + ..., in that order. Grid: (tiles of the n elements,)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tile = planes + i
    acc = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.static_range(SPLIT):
        acc += tl.load(tile, i < n, other=0.0)
        tile += n
    tl.store(out + i, acc.to(out.dtype.element_ty), i < n)


@triton.jit
def sum_blocks_kernel(planes, out, segment_B, n_blocks, n, BLOCK: tl.constexpr):
    """out[segment] = sum of the planes of its blocks, in their order. Grid: (segments, tiles of n)."""
    segment = tl.program_id(0)
    i = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tile = planes + i
    acc = tl.zeros((BLOCK,), tl.float32)
    for block in range(n_blocks):
        if tl.load(segment_B + block) == segment:
            acc += tl.load(tile, i < n, other=0.0)
        tile += n
    tl.store(out + segment.to(tl.int64) * n + i, acc, i < n)


@triton.jit
def _dot(a, b, acc, DOT_DTYPE: tl.constexpr):
    """acc + a b with operands in DOT_DTYPE; float32 ones stay float32 (by default they become TF32)."""
    return tl.dot(a.to(DOT_DTYPE), b.to(DOT_DTYPE), acc, input_precision="ieee")


@triton.jit
def _block_rows(rows, start_B, length_B, block, PERMUTED: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """(sorted position, input row, whether there is such a row) of each row of a block."""
    offset = tl.arange(0, BLOCK_ROWS)
    used = offset < tl.load(length_B + block)
    position = (tl.load(start_B + block) + offset).to(tl.int64)
    return position, _input_row(rows, position, used, PERMUTED), used


@triton.jit
def _input_row(rows, position, used, PERMUTED: tl.constexpr):
    """The row of the layer's input at a sorted position."""
    if PERMUTED:
        return tl.load(rows + position, used, other=0)
    return position


@triton.jit
def _columns(slice_index, COLUMNS: tl.constexpr):
    """(first, stop) feature of a slice."""
    first = tl.full((), COLUMNS[0], tl.int32)
    stop = tl.full((), COLUMNS[1], tl.int32)
    for j in tl.static_range(1, len(COLUMNS) - 1):
        first = tl.where(slice_index == j, COLUMNS[j], first)
        stop = tl.where(slice_index == j, COLUMNS[j + 1], stop)
    return first, stop


@triton.jit
def _feature_tile(tile, COLUMNS: tl.constexpr, TILES: tl.constexpr, BLOCK_FEATURES: tl.constexpr):
    """(slice, features, whether they are inside it) of a feature tile."""
    slice_index = tl.full((), 0, tl.int32)
    first_tile = tl.full((), 0, tl.int32)
    for j in tl.static_range(1, len(TILES) - 1):
        slice_index = tl.where(tile >= TILES[j], j, slice_index)
        first_tile = tl.where(tile >= TILES[j], TILES[j], first_tile)
    first, stop = _columns(slice_index, COLUMNS)
    feature = first + (tile - first_tile) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    return slice_index, feature, feature < stop
