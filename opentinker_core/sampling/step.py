"""One forward pass over pieces of running sequences: prompts' chunks and single tokens, of any versions.

All pieces lie end to end in one flat row. What the pass gives for a piece does not depend on the others:
products work row by row (rows are padded to a number for which the library is invariant, see
`lora.rowwise`), and attention has the shape of a sequence's own shelf.

Axes: T tokens of the flat row, S sequences of a shelf, H query heads, G query heads of a key-value head,
K key-value heads, Q queries of a piece, W columns of a shelf, D features of a head, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opentinker_core.lora.pool import AdapterPool, Slot
from opentinker_core.lora.routing import Routing, Rows, routed
from opentinker_core.models.decoder import Decoder
from opentinker_core.sampling.kv_cache import BLOCK, Place, Shelf
from opentinker_kernels import tiles
from opentinker_kernels.threads import one_thread

_ROWS = 8
"""Rows of the flat row, and those whose logits are wanted, come in multiples of this (see `lora.packed`)."""
_KEPT = 8
"""Routings that are kept."""
_QUERIES = 4
"""A head's queries come in multiples of this; others get bits that depend on where in memory they lie."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Adjacent tokens of a sequence, whose keys and values join those of the tokens before them."""

    tokens: Sequence[int]
    start: int
    """Position of the first."""
    place: Place
    slot: Slot | None
    is_chunk: bool
    """Of a prompt, from a multiple of `BLOCK` on; else one token."""
    wanted: int
    """Of how many of the tokens, from the end, logits are wanted."""

    @property
    def width(self) -> int:
        """Tokens with padding: chunks are whole blocks."""
        return -(-len(self.tokens) // BLOCK) * BLOCK if self.is_chunk else 1


_NARROWEST = 16
"""Features of layers whose LoRA products are tiled; torch multiplies smaller matrices in another way."""
_SMALL_LAYER = 1 << 18
"""Numbers in a layer's weight, on average, up to which one thread decodes: 64 rows by 256 x 768 take 240
microseconds on one core or two, and waking the other for a hundred of such products a step takes longer."""

_Kind = tuple[Slot | None, bool]
"""Which adapter a row has, and whether it is multiplied together with others of it, as single tokens are."""


class Stepper:
    """Runs steps; what adapters apply to which rows is worked out once for steps that are composed alike."""

    def __init__(self, decoder: Decoder, pool: AdapterPool) -> None:
        self._decoder, self._pool = decoder, pool
        self._routings: dict[tuple[object, ...], Routing | None] = {}
        shapes = pool.model.shapes.values()
        self._may_tile = (
            pool.device.type == "cpu"
            and decoder.model.dtype == torch.float32
            and min(min(shape) for shape in shapes) >= _NARROWEST
        )
        sizes = [inputs * outputs for inputs, outputs in shapes]
        self._is_small = pool.device.type == "cpu" and sum(sizes) <= _SMALL_LAYER * len(sizes)

    def run(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Logits (wanted, V) of each piece; keys and values go to the pieces' places."""
        may_tile = self._may_tile and tiles.are_invariant()
        with one_thread(self._is_small and not any(piece.is_chunk for piece in pieces)):
            return self._run(pieces, may_tile)

    def _run(self, pieces: Sequence[Piece], may_tile: bool) -> list[Tensor]:
        kinds: list[_Kind] = [(piece.slot, may_tile and not piece.is_chunk) for piece in pieces]
        order = sorted(range(len(pieces)), key=lambda index: _place_of(pieces[index], kinds[index]))
        ordered, kinds = [pieces[index] for index in order], [kinds[index] for index in order]
        batch = _FlatBatch(self._decoder, ordered)
        rows = [(piece.width, *kind) for piece, kind in zip(ordered, kinds, strict=True)]
        with routed(self._routing(rows, batch.padding)):
            hidden_TD = self._decoder.hidden_of_flat_row(batch.tokens_T, batch.positions_T, batch.layout)
        rows = [(1, *kind) for piece, kind in zip(ordered, kinds, strict=True) for _ in range(piece.wanted)]
        logits_MV = self._logits(hidden_TD, batch.wanted_M, rows)
        parts = dict(zip(order, logits_MV.split([piece.wanted for piece in ordered]), strict=True))
        return [parts[index] for index in range(len(pieces))]

    def _logits(
        self, hidden_TD: Tensor, rows_M: np.ndarray, rows: Sequence[tuple[int, Slot | None, bool]]
    ) -> Tensor:
        """Logits (M, V) of some rows of the flat row, of which `rows` tells the adapters."""
        if not len(rows_M):
            return hidden_TD.new_empty(0, 1)
        padding = -len(rows_M) % _ROWS
        picked_M = torch.from_numpy(np.pad(rows_M, (0, padding), "edge")).to(hidden_TD.device)
        with routed(self._routing(rows, padding)):
            return self._decoder.logits(hidden_TD[picked_M])[: len(rows_M)]

    def _routing(self, rows: Sequence[tuple[int, Slot | None, bool]], padding: int) -> Routing | None:
        key = (self._pool.stats.loads, padding, *rows)  # a load may put another adapter into a slot
        try:
            return self._routings[key]
        except KeyError:
            if len(self._routings) >= _KEPT:
                self._routings.clear()
            self._routings[key] = routing = self._new_routing(rows, padding)
            return routing

    def _new_routing(self, rows: Sequence[tuple[int, Slot | None, bool]], padding: int) -> Routing | None:
        if all(slot is None for _, slot, _ in rows):
            return None
        parts: list[Rows] = []
        for (slot, tiled), members in groupby(rows, key=lambda row: row[1:]):
            counts = [count for count, _, _ in members]
            parts += [Rows(count, slot, tiled=tiled) for count in ([sum(counts)] if tiled else counts)]
        # On a GPU the library's products are not invariant, so nothing is won by kernels that are.
        invariant = self._pool.device.type == "cpu"
        return Routing(self._pool, [*parts, Rows(padding, None)] if padding else parts, invariant=invariant)


def _place_of(piece: Piece, kind: _Kind) -> tuple[int, bool, bool, int]:
    """Rows of a rank, then of a slot, stand together; single tokens before chunks."""
    slot, tiled = kind
    rank, index = (slot.rank, slot.index) if slot else (1 << 30, 0)
    return (rank, piece.is_chunk, not tiled, index)


class _FlatBatch:
    """The tokens of a step, and where attention finds what."""

    def __init__(self, decoder: Decoder, pieces: Sequence[Piece]) -> None:
        device = decoder.device
        tokens: list[int] = []
        positions: list[int] = []
        starts: list[int] = []
        for piece in pieces:
            starts.append(len(tokens))
            tokens += [*piece.tokens, *[piece.tokens[-1]] * (piece.width - len(piece.tokens))]
            positions += range(piece.start, piece.start + piece.width)
        self.padding = -len(tokens) % _ROWS
        tokens += [0] * self.padding
        positions += [0] * self.padding
        self.tokens_T = torch.tensor(tokens, device=device)
        self.positions_T = torch.tensor(positions, device=device)
        ends = np.array([start + len(piece.tokens) for piece, start in zip(pieces, starts, strict=True)])
        wanted = np.array([piece.wanted for piece in pieces])
        self.wanted_M = _ranges(ends - wanted, wanted)
        self.layout = _CachedLayout(pieces, starts, len(tokens), device)


class _CachedLayout:
    """Attention of the pieces to their sequences' places (see `models.attention.Layout`)."""

    def __init__(
        self, pieces: Sequence[Piece], starts: Sequence[int], total: int, device: torch.device
    ) -> None:
        located = sorted(
            zip(pieces, starts, strict=True), key=lambda pair: (pair[0].place.shelf.width, pair[0].width)
        )
        self._reads = [
            _Read(list(members), device)
            for _, members in groupby(located, key=lambda pair: (pair[0].place.shelf.width, pair[0].width))
        ]
        self._writes = [
            _Write(list(members), device)
            for _, members in groupby(located, key=lambda pair: pair[0].place.shelf.width)
        ]
        rows_T = np.concatenate([read.rows_T for read in self._reads])
        back_T = np.full(total, 0)
        back_T[rows_T] = np.arange(len(rows_T))  # padding takes the first row's output, which is finite
        self._back_T = torch.from_numpy(back_T).to(device)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None,
        *,
        scaling: float | None = None,
        **_: Any,
    ) -> Tensor:
        """See `Layout.attend`: store the new keys and values, then attend to all of a sequence's."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        key_TKD, value_TKD = key[0].transpose(0, 1), value[0].transpose(0, 1)
        for write in self._writes:
            write.store(layer, key_TKD, value_TKD)
        query_THD = query[0].transpose(0, 1)
        outputs = [read.attend(layer, query_THD, window, scaling) for read in self._reads]
        out_THD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out_THD.index_select(0, self._back_T)


class _Write:
    """The new tokens of one shelf."""

    def __init__(self, members: Sequence[tuple[Piece, int]], device: torch.device) -> None:
        self._shelf = members[0][0].place.shelf
        counts = np.array([len(piece.tokens) for piece, _ in members])
        rows_T = np.repeat([piece.place.row for piece, _ in members], counts)
        columns_T = _ranges(np.array([piece.start for piece, _ in members]), counts)
        flat_T = _ranges(np.array([start for _, start in members]), counts)
        self._rows_T, self._columns_T, self._flat_T = (
            torch.from_numpy(x).to(device) for x in (rows_T, columns_T, flat_T)
        )

    def store(self, layer: int, key_TKD: Tensor, value_TKD: Tensor) -> None:
        """Put keys and values where they belong."""
        data_2SKWD = self._shelf.data_LSHWD[layer]
        data_2SKWD[0][self._rows_T, :, self._columns_T] = key_TKD.index_select(0, self._flat_T)
        data_2SKWD[1][self._rows_T, :, self._columns_T] = value_TKD.index_select(0, self._flat_T)


class _Read:
    """Pieces of one width in one shelf, attended to in one call."""

    def __init__(self, members: Sequence[tuple[Piece, int]], device: torch.device) -> None:
        members = sorted(members, key=lambda pair: pair[0].place.row)
        self._shelf: Shelf = members[0][0].place.shelf
        self._queries = members[0][0].width
        rows = np.array([piece.place.row for piece, _ in members])
        self.rows_T = _ranges(np.array([start for _, start in members]), np.full(len(rows), self._queries))
        """Rows of the flat row, in the order of the output."""
        self._flat_T = torch.from_numpy(self.rows_T).to(device)
        adjacent = rows[-1] - rows[0] + 1 == len(rows)
        self._places = slice(rows[0], rows[-1] + 1) if adjacent else torch.from_numpy(rows).to(device)
        at_SQ = np.array([piece.start for piece, _ in members])[:, None] + np.arange(self._queries)
        # A chunk's padding sees what its last token sees.
        last_S1 = np.array([piece.start + len(piece.tokens) - 1 for piece, _ in members])[:, None]
        self._at_SQ1 = torch.from_numpy(np.minimum(at_SQ, last_S1)[:, :, None]).to(device)
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query_THD: Tensor, window: int | None, scaling: float | None) -> Tensor:
        """Outputs (S * Q, H, D)."""
        key_SKWD, value_SKWD = self._shelf.data_LSHWD[layer][:, self._places]
        if self._queries == 1 and query_THD.dtype == torch.float32 and query_THD.device.type == "cpu":
            query_SHD = query_THD.index_select(0, self._flat_T)
            return self._attend_tokens(query_SHD, key_SKWD, value_SKWD, window, scaling)
        heads, kv_heads = query_THD.shape[1], key_SKWD.shape[1]
        sizes = (len(key_SKWD), self._queries, kv_heads, heads // kv_heads)
        # The query heads of a key-value head become queries of one head: (S, K, G * Q, D).
        query_SQKGD = query_THD[self._flat_T].unflatten(0, sizes[:2]).unflatten(2, sizes[2:])
        query_SKqD = query_SQKGD.permute(0, 2, 3, 1, 4).flatten(2, 3)
        count = query_SKqD.shape[2]
        mask_S1qW = self._mask(window, count + -count % _QUERIES, query_THD.dtype)
        out_SKqD = nn.functional.scaled_dot_product_attention(
            nn.functional.pad(query_SKqD, (0, 0, 0, -count % _QUERIES)),
            key_SKWD,
            value_SKWD,
            mask_S1qW,
            scale=scaling,
        )
        out_SKGQD = out_SKqD[:, :, :count].unflatten(2, (sizes[3], sizes[1]))
        return out_SKGQD.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)

    def _attend_tokens(
        self,
        query_SHD: Tensor,
        key_SKWD: Tensor,
        value_SKWD: Tensor,
        window: int | None,
        scaling: float | None,
    ) -> Tensor:
        """Outputs (S, H, D) of one query of each sequence: two batched products, a matrix a key-value head.

        The library's own attention takes a third longer, and on two threads three times as long.
        """
        sequences, heads, features = query_SHD.shape
        query_NGD = query_SHD.reshape(sequences * key_SKWD.shape[1], -1, features)
        count = query_NGD.shape[1]
        if padding := -count % _QUERIES if count > _QUERIES else 0:
            query_NGD = nn.functional.pad(query_NGD, (0, 0, 0, padding))
        mask_S1qW = self._mask(window, count + padding, query_SHD.dtype)
        mask_NqW = mask_S1qW.expand(-1, key_SKWD.shape[1], -1, -1).flatten(0, 1)
        scores_NqW = torch.baddbmm(
            mask_NqW,
            query_NGD,
            key_SKWD.flatten(0, 1).transpose(1, 2),
            alpha=features**-0.5 if scaling is None else scaling,
        )
        out_NqD = torch.bmm(scores_NqW.softmax(-1), value_SKWD.flatten(0, 1))
        return out_NqD[:, :count].reshape(sequences, heads, features)

    def _mask(self, window: int | None, queries: int, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, (S, 1, queries, W); made once a step."""
        if window not in self._masks:
            columns_W = torch.arange(self._shelf.width, device=self._at_SQ1.device)
            visible_SQW = columns_W <= self._at_SQ1
            if window is not None:
                visible_SQW &= columns_W > self._at_SQ1 - window
            mask_SQW = torch.zeros(visible_SQW.shape, dtype=dtype, device=visible_SQW.device)
            mask_SQW.masked_fill_(~visible_SQW, float("-inf"))
            repeated = torch.arange(queries, device=mask_SQW.device) % self._queries
            self._masks[window] = mask_SQW[:, repeated][:, None]
        return self._masks[window]


def _ranges(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """As many numbers from each first on as are counted, end to end."""
    ends = counts.cumsum()
    return np.repeat(firsts - (ends - counts), counts) + np.arange(ends[-1])
