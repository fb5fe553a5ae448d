"""Sizes of the tiles in which the kernels work, by rules rather than by tuning.

What is chosen decides in which order sums run. So it follows from the shape of the layer and the
number of rows of the whole batch, never from who shares the batch. Invariant plans are counted as one
fixed number of rows: then a row's result is the same to the bit in every batch.
"""

from dataclasses import dataclass

FEW_ROWS = 256
"""Up to here (decoding) rows come in small blocks: most adapters have a row or two."""
STAGE_BYTES = 32 * 1024
"""Shared memory of a stage of a pipelined loop at most: three fit in the 99 KiB of sm_86, two in AMD's 64."""
ENOUGH_PROGRAMS = 256
"""About two for each multiprocessor of a large GPU: no need to split the work further."""
INVARIANT_ROWS = 4096
"""Rows that an invariant plan is taken to have: those of a training batch."""
LEAST_PART = 512
"""Features that a part of a split sum has at least."""
LARGEST_SPLIT = 16
SUM_TILE = 1024
"""Elements that a program of the ordered sums adds up."""


@dataclass(frozen=True)
class Tiles:
    """Rows, ranks and features a program holds at a time, and the parts into which shrink splits its sum."""

    rows: int
    rank: int
    features: int
    split: int = 1


def shrink_tiles(n_rows: int, width: int, rank: int, itemsize: int) -> Tiles:
    """Tiles to sum over `width` features (of the widest slice), with `itemsize` bytes an element."""
    rows = _block_rows(n_rows)
    rank_tile = _rank_tile(rank, 128)
    features = _fit((rows + rank_tile) * itemsize)
    programs, split = power_of_two(ceil_div(n_rows, rows)) * ceil_div(rank, rank_tile), 1
    while split < LARGEST_SPLIT and 2 * split * LEAST_PART <= width and programs * split < ENOUGH_PROGRAMS:
        split *= 2
    return Tiles(rows, rank_tile, features, split)


def expand_tiles(n_rows: int, rank: int, itemsize: int) -> Tiles:
    """Tiles of the output; the sum over ranks, of at most 64 at a time, is never split."""
    rank_tile = _rank_tile(rank, 64)
    return Tiles(_block_rows(n_rows), rank_tile, _fit(2 * rank_tile * itemsize))


def wgrad_tiles(rank: int, itemsize: int) -> Tiles:
    """Tiles of the gradient, and rows added up at a time."""
    return Tiles(64 if itemsize <= 2 else 32, _rank_tile(rank, 64), 128)


def wgrad_chunk(n_tiles: int) -> int:
    """Rows of a segment that one program adds up, where the gradient of a layer has `n_tiles` tiles."""
    return 1024 if n_tiles < ENOUGH_PROGRAMS // 4 else 8192


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _block_rows(n_rows: int) -> int:
    return 16 if n_rows <= FEW_ROWS else 64


def _fit(feature_bytes: int) -> int:
    """Features of a tile of which a stage holds `feature_bytes` each."""
    return min(128, STAGE_BYTES // power_of_two(feature_bytes))


def _rank_tile(rank: int, largest: int) -> int:
    return min(max(16, power_of_two(rank)), largest)  # tensor cores want at least 16
