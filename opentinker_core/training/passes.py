"""Fused passes: micro-batches of many policies through the base model at once.

What a micro-batch holds follows from its own policy's data alone, and so does the shape of every
product that mixes its rows. Passes only put micro-batches side by side. That is what makes a
policy's result independent, to the bit, of who trains beside it.

Axes: B rows, T columns, M weighted positions, K targets a position, D hidden features, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.pool import AdapterPool, Slot
from opentinker_core.lora.routing import Routing, Rows, routed, same_routing
from opentinker_core.lora.rowwise import QUANTUM
from opentinker_core.models.attention import FlatRows, SeparateRows
from opentinker_core.models.decoder import Decoder
from opentinker_core.sampling.distribution import SHAPE_FIELDS, Truncation, is_truncated, log_distribution
from opentinker_core.sampling.token_logprobs import token_logprobs
from opentinker_core.trajectories.packing import MicroBatch
from opentinker_core.trajectories.types import Datum

_HEAD_ROWS = 1024
"""Positions whose logits are computed at once, and the number of them from which they are not kept."""


@dataclass(frozen=True, eq=False)
class Share:
    """One policy's micro-batch in a pass."""

    owner: int
    """Which of the caller's batches it belongs to."""
    batch: MicroBatch
    datums: Sequence[Datum]
    slot: Slot | None
    gradient: Adapter | None

    @property
    def tokens(self) -> int:
        return self.batch.tokens_BT.size

    def rows(self, count: int) -> Rows:
        """`count` adjacent rows of a pass that belong to this share."""
        return Rows(count, self.slot, self.gradient)


def widened(batch: MicroBatch) -> MicroBatch:
    """The micro-batch with rows padded to a multiple of `QUANTUM` columns; padding sees itself only."""
    width = batch.tokens_BT.shape[1]
    extra = -width % QUANTUM
    if extra == 0:
        return batch
    columns = ((0, 0), (0, extra))
    attention_BTT = batch.attention_BTT
    if attention_BTT is not None:
        attention_BTT = np.pad(attention_BTT, (*columns, (0, extra)))
        attention_BTT[:, range(width, width + extra), range(width, width + extra)] = True
    tokens_BT, positions_BT = np.pad(batch.tokens_BT, columns), np.pad(batch.positions_BT, columns)
    return replace(batch, tokens_BT=tokens_BT, positions_BT=positions_BT, attention_BTT=attention_BTT)


def cut(
    micro_batches: Sequence[Sequence[MicroBatch]],
    policies: Sequence[str | None],
    budget: int,
    max_policies: int,
) -> Iterator[list[tuple[int, MicroBatch]]]:
    """Passes of at most `budget` tokens and `max_policies` policies: (batch index, micro-batch) pairs.

    Batches take turns, each in its own order; a larger micro-batch stands alone. A pass has one
    micro-batch of a batch at most: so gradients of several are added up in their order, whatever the passes.
    """
    longest = max(map(len, micro_batches), default=0)
    queue = [(i, own[j]) for j in range(longest) for i, own in enumerate(micro_batches) if j < len(own)]
    taken: dict[int, MicroBatch] = {}
    tokens, names = 0, set[str | None]()
    for index, batch in queue:
        size = batch.tokens_BT.size
        full = tokens + size > budget or len(names | {policies[index]}) > max_policies
        if taken and (full or index in taken):
            yield list(taken.items())
            taken, tokens, names = {}, 0, set()
        taken[index] = batch
        tokens += size
        names.add(policies[index])
    if taken:
        yield list(taken.items())


class FusedPass:
    """One forward pass over the shares of several policies; rows of one slot should be adjacent."""

    def __init__(self, decoder: Decoder, pool: AdapterPool, shares: Sequence[Share]) -> None:
        self._decoder, self._pool, self._shares = decoder, pool, shares

    def logprobs(self) -> list[Tensor]:
        """Of each share, the logprobs of its weighted targets; logits exist at these positions only.

        (M,), or (M, K) where a datum of the share has several targets a position (see `MicroBatch.gather`).
        """
        hidden_TD = self._hidden()
        pieces = list(self._pieces())
        recompute = torch.is_grad_enabled() and sum(len(piece.rows_M) for piece in pieces) > _HEAD_ROWS
        parts: list[list[Tensor]] = [[] for _ in self._shares]
        for together in _together(pieces):
            for piece, logprobs_M in zip(together, self._head(hidden_TD, together, recompute), strict=True):
                parts[piece.share].append(logprobs_M[: piece.wanted])
        return [torch.cat(own) for own in parts]

    def _routing(self, counts: Sequence[tuple[Share, int]]) -> Routing | None:
        if all(share.slot is None for share, _ in counts):
            return None
        return Routing(self._pool, [share.rows(count) for share, count in counts])

    def _hidden(self) -> Tensor:
        device = self._decoder.device
        tokens_T = np.concatenate([share.batch.tokens_BT.reshape(-1) for share in self._shares])
        positions_T = np.concatenate([share.batch.positions_BT.reshape(-1) for share in self._shares])
        with routed(self._routing([(share, share.tokens) for share in self._shares])):
            return self._decoder.hidden_of_flat_row(
                torch.from_numpy(tokens_T).to(device),
                torch.from_numpy(positions_T).to(device),
                SeparateRows(self._flat_rows()),
            )

    def _flat_rows(self) -> list[FlatRows]:
        """The shares' rows; causal ones of one width that are adjacent are attended to together."""
        device, start, flat = self._decoder.device, 0, list[FlatRows]()
        for share in self._shares:
            batch = share.batch
            rows, width = batch.tokens_BT.shape
            if batch.attention_BTT is not None:
                positions, visible = (
                    torch.from_numpy(x).to(device) for x in (batch.positions_BT, batch.attention_BTT)
                )
                flat.append(FlatRows(start, rows, width, positions, visible))
            elif flat and flat[-1].width == width and flat[-1].visible_BTT is None:
                flat[-1] = FlatRows(flat[-1].start, flat[-1].rows + rows, width)
            else:
                flat.append(FlatRows(start, rows, width))
            start += share.tokens
        return flat

    def _pieces(self) -> Iterator["_Piece"]:
        start = 0
        for index, share in enumerate(self._shares):
            batch = share.batch
            rows_M = start + batch.row_M * batch.tokens_BT.shape[1] + batch.column_M
            targets_M = batch.gather([datum.target_tokens_N for datum in share.datums])
            for first in range(0, len(rows_M), _HEAD_ROWS):
                part = slice(first, first + _HEAD_ROWS)
                yield _Piece.padded(index, rows_M[part], targets_M[part])
            start += share.tokens

    def _head(self, hidden_TD: Tensor, pieces: Sequence["_Piece"], recompute: bool) -> list[Tensor]:
        device = self._decoder.device
        rows_M = torch.from_numpy(np.concatenate([piece.rows_M for piece in pieces])).to(device)
        counts = [(self._shares[piece.share], len(piece.rows_M)) for piece in pieces]
        alike = _alike(pieces, [share.datums[0] for share, _ in counts], device)
        routing = self._routing(counts)

        def logprobs(hidden_MD: Tensor) -> tuple[Tensor, ...]:
            return _of_targets(self._decoder.logits(hidden_MD), alike)

        with routed(routing):
            # Not `hidden_TD[rows_M]`: threads would add the gradients of a repeated row in any order.
            hidden_MD = nn.functional.embedding(rows_M, hidden_TD)
            if recompute:  # in the backward pass, instead of keeping the logits
                results = checkpoint(logprobs, hidden_MD, use_reentrant=False, context_fn=same_routing)
            else:
                results = logprobs(hidden_MD)
        return [part for one, result in zip(alike, results, strict=True) for part in result.split(one.sizes)]


@dataclass(frozen=True, eq=False)
class _Piece:
    """Weighted positions of one share whose logits are computed together."""

    share: int
    rows_M: np.ndarray
    """Of the flat row; the last is repeated to a whole number of `QUANTUM`."""
    targets_M: np.ndarray
    """Or (M, K)."""
    wanted: int
    """How many are not repetitions."""

    @classmethod
    def padded(cls, share: int, rows_M: np.ndarray, targets_M: np.ndarray) -> "_Piece":
        extra = (0, -len(rows_M) % QUANTUM)
        targets_extra = (extra, *[(0, 0)] * (targets_M.ndim - 1))
        return cls(
            share, np.pad(rows_M, extra, "edge"), np.pad(targets_M, targets_extra, "edge"), len(rows_M)
        )


def _together(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces in order, as many at once as have at most `_HEAD_ROWS` rows."""
    taken: list[_Piece] = []
    for piece in pieces:
        if taken and sum(len(one.rows_M) for one in (*taken, piece)) > _HEAD_ROWS:
            yield taken
            taken = []
        taken.append(piece)
    if taken:
        yield taken


@dataclass(frozen=True, eq=False)
class _Alike:
    """Adjacent pieces whose targets are of one shape of the distribution, and as many a position."""

    shape: Truncation
    targets: Tensor
    """(M,) or (M, K), of all of them."""
    sizes: list[int]


def _alike(
    pieces: Sequence[_Piece], shapes: Sequence[Truncation], device: torch.device | str
) -> list[_Alike]:
    def key(index: int) -> tuple[object, ...]:
        shape = shapes[index]
        return (*(getattr(shape, name) for name in SHAPE_FIELDS), *pieces[index].targets_M.shape[1:])

    found = []
    for _, group in groupby(range(len(pieces)), key=key):
        own = list(group)
        targets = [pieces[index].targets_M for index in own]
        tensor = torch.from_numpy(np.concatenate(targets)).to(device)
        found.append(_Alike(shapes[own[0]], tensor, [len(one) for one in targets]))
    return found


def _of_targets(logits_MV: Tensor, alike: Sequence[_Alike]) -> tuple[Tensor, ...]:
    """Logprobs of the targets."""
    counts = [len(one.targets) for one in alike]
    # Each part's memory is written to (`token_logprobs`), which plain views of one tensor may not be.
    parts = [logits_MV] if len(alike) == 1 else logits_MV.unsafe_split_with_sizes(counts)
    return tuple(_of_shape(part, one.targets, one.shape) for part, one in zip(parts, alike, strict=True))


def _of_shape(logits_MV: Tensor, targets: Tensor, shape: Truncation) -> Tensor:
    if not is_truncated(shape):
        return token_logprobs(logits_MV, targets, shape.temperature)
    targets_M = targets  # one a position: see `ClientDatum`
    return log_distribution(logits_MV, shape, keep_M=targets_M).gather(1, targets_M[:, None]).squeeze(1)
