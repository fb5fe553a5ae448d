"""How datums become rows of a forward pass: padded, packed, or sharing the prompt of a group.

A row holds blocks; a block is one prefix followed by segments. A token sees its block's prefix
and the tokens before it in its own segment, at the position it has in its own sequence. So one
description covers plain padding (one block, one segment a row), packing (several blocks) and
prefix sharing (several segments: the completions of one prompt, which is run once). The forward
pass gives every datum exactly what it would get alone.

Axes: N positions of a datum, K targets a position, B rows, T columns of a row, M weighted positions of a
micro-batch.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from opentinker_core.trajectories.errors import TrajectoryError
from opentinker_core.trajectories.types import Datum

MAX_SHARED_ROW = 1024
"""Columns of a row with several segments: its attention mask is dense, T x T."""


@dataclass
class _Row:
    """One row under construction."""

    tokens: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    blocks: list[np.ndarray] = field(default_factory=list)
    segments: list[np.ndarray] = field(default_factory=list)
    columns: dict[int, np.ndarray] = field(default_factory=dict)
    """Datum index → column of each of its N positions."""
    length: int = 0
    n_blocks: int = 0

    def add_block(self, prefix: np.ndarray, members: Sequence[int], datums: Sequence[Datum]) -> None:
        block, shared = self.n_blocks, len(prefix)
        prefix_columns = self._append(prefix, 0, block, 0)
        for segment, index in enumerate(members, start=1):
            rest = datums[index].input_tokens_N[shared:]
            self.columns[index] = np.concatenate([prefix_columns, self._append(rest, shared, block, segment)])
        self.n_blocks += 1

    def _append(self, tokens: np.ndarray, position: int, block: int, segment: int) -> np.ndarray:
        n = len(tokens)
        self.tokens.append(tokens)
        self.positions.append(np.arange(position, position + n))
        self.blocks.append(np.full(n, block))
        self.segments.append(np.full(n, segment))
        self.length += n
        return np.arange(self.length - n, self.length)

    @property
    def is_causal(self) -> bool:
        """Whether plain causal attention over the row is already right."""
        return len(self.columns) == 1


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows that go through the model at once, and where the weighted positions are in them."""

    tokens_BT: np.ndarray
    positions_BT: np.ndarray
    attention_BTT: np.ndarray | None
    """bool, true where the second axis' token sees the third's; None: plain causal."""
    row_M: np.ndarray
    column_M: np.ndarray
    datum_M: np.ndarray
    """Index of the datum each weighted position belongs to."""
    position_M: np.ndarray
    """Index into the datum's N positions."""

    def runs(self) -> Iterator[tuple[int, slice]]:
        """Datums with their weighted positions, which lie together: slices of M."""
        starts = np.flatnonzero(np.diff(self.datum_M, prepend=-1))
        for start, end in pairwise([*starts.tolist(), len(self.datum_M)]):
            yield int(self.datum_M[start]), slice(start, end)

    def gather(self, arrays_D: Sequence[np.ndarray]) -> np.ndarray:
        """Entries of the weighted positions, from one array a datum: (M,) if all are (N,).

        If any has several entries a position, (N, K), then (M, K) with the largest K; the others are
        filled up with 0.
        """
        parts = [arrays_D[datum][self.position_M[at]] for datum, at in self.runs()]
        if all(part.ndim == 1 for part in parts):
            return np.concatenate(parts)
        parts = [part.reshape(len(part), -1) for part in parts]
        width = max(part.shape[1] for part in parts)
        return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts])


def micro_batches(
    datums: Sequence[Datum], budget: int, *, share_prefix: bool = True, pack: bool = False
) -> Iterator[MicroBatch]:
    """Lay out `datums` in rows and split these into micro-batches of at most `budget` padded tokens.

    A single longer row stands alone, and holds one datum. The result depends on the datums and
    arguments only; rows are taken from long to short, those of equal length in the order of the datums.

    Raises:
        TrajectoryError: the budget is not positive.
    """
    if budget < 1:
        raise TrajectoryError("budget", budget, "a positive number of tokens")
    rows = _rows(datums, min(budget, MAX_SHARED_ROW), share_prefix, pack)
    return _split_rows(sorted(rows, key=lambda row: -row.length), datums, budget)


def trained_positions(datums: Sequence[Datum]) -> MicroBatch:
    """The weighted positions of all datums, in no rows: for what is computed of logprobs alone."""
    places = [np.flatnonzero(datum.mask_N) for datum in datums]
    datum_M = np.repeat(np.arange(len(datums)), [len(place) for place in places])
    position_M, rows = np.concatenate(places), np.empty((0, 0), np.int64)
    return MicroBatch(rows, rows, None, datum_M, position_M, datum_M, position_M)


def _split_rows(rows: Sequence[_Row], datums: Sequence[Datum], budget: int) -> Iterator[MicroBatch]:
    """Micro-batches of `rows`, which are sorted from long to short."""
    batch: list[_Row] = []
    for row in rows:
        if batch and batch[0].length * (len(batch) + 1) > budget:
            yield _assemble(batch, datums)
            batch = []
        batch.append(row)
    if batch:
        yield _assemble(batch, datums)


def _rows(datums: Sequence[Datum], limit: int, share_prefix: bool, pack: bool) -> list[_Row]:
    """Rows of at most `limit` columns (a longer datum alone); packed by first fit, from long to short."""
    rows: list[_Row] = []
    blocks = _blocks(datums, limit, share_prefix)
    for length, prefix, members in sorted(blocks, key=lambda block: -block[0]):
        row = _first_fit(rows, length, limit) if pack else None
        if row is None:
            rows.append(row := _Row())
        row.add_block(prefix, members, datums)
    return rows


def _blocks(
    datums: Sequence[Datum], limit: int, share_prefix: bool
) -> Iterator[tuple[int, np.ndarray, list[int]]]:
    """(length, prefix, datums) of each block: the datums of equal prefix, as many as `limit` allows."""
    groups: dict[bytes | int, list[int]] = defaultdict(list)
    for index, datum in enumerate(datums):
        prefix = datum.shared_inputs
        groups[prefix.tobytes() if share_prefix and len(prefix) else index].append(index)
    for members in groups.values():
        first = datums[members[0]]
        prefix = first.shared_inputs if share_prefix else first.input_tokens_N[:0]
        for part in _split(members, len(prefix), datums, limit):
            yield len(prefix) + sum(len(datums[i]) - len(prefix) for i in part), prefix, part


def _split(members: Sequence[int], shared: int, datums: Sequence[Datum], limit: int) -> Iterator[list[int]]:
    part: list[int] = []
    length = shared
    for index in members:
        own = len(datums[index]) - shared
        if part and length + own > limit:
            yield part
            part, length = [], shared
        part.append(index)
        length += own
    yield part


def _first_fit(rows: Sequence[_Row], length: int, limit: int) -> _Row | None:
    return next((row for row in rows if row.length + length <= limit), None)


def _assemble(rows: Sequence[_Row], datums: Sequence[Datum]) -> MicroBatch:
    width = max(row.length for row in rows)
    tokens_BT = np.zeros((len(rows), width), np.int64)
    positions_BT = np.zeros((len(rows), width), np.int64)
    weighted: list[tuple[np.ndarray, ...]] = []
    for b, row in enumerate(rows):
        tokens_BT[b, : row.length] = np.concatenate(row.tokens)
        positions_BT[b, : row.length] = np.concatenate(row.positions)
        for index, columns in row.columns.items():
            at = np.flatnonzero(datums[index].mask_N)
            weighted.append((np.full(len(at), b), columns[at], np.full(len(at), index), at))
    attention = None if all(row.is_causal for row in rows) else _attention(rows, width)
    return MicroBatch(
        tokens_BT, positions_BT, attention, *(np.concatenate(x) for x in zip(*weighted, strict=True))
    )


def _attention(rows: Sequence[_Row], width: int) -> np.ndarray:
    """Padding sees itself only, which keeps its softmax finite and is read by nobody."""
    attention_BTT = np.zeros((len(rows), width, width), bool)
    for b, row in enumerate(rows):
        block, segment = np.concatenate(row.blocks), np.concatenate(row.segments)
        same = (block[:, None] == block) & ((segment == 0) | (segment[:, None] == segment))
        attention_BTT[b, : row.length, : row.length] = np.tril(same)
    diagonal = np.arange(width)
    attention_BTT[:, diagonal, diagonal] = True
    return attention_BTT
