"""The routing plan: which rows of a forward pass use which adapter slot.

It is built once a forward pass on the host, shared by all layers, and used again by the backward
pass. Rows are ordered by slot; a segment is a run of them that share one. Rows in no segment use
the base model alone.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Cached = TypeVar("Cached")

NO_SLOT = -1
"""The slot of rows without an adapter, and of blocks that are not used."""


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of the sorted order; they use `slot`."""

    slot: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Blocks:
    """Segments cut to blocks of a fixed number of rows; int32 tensors, one entry a block.

    Their number may be more than is needed, so that a captured graph can be replayed with another
    plan: the rest, at the end, has the slot `NO_SLOT` and no rows.
    """

    slot_B: Tensor
    start_B: Tensor
    length_B: Tensor
    segment_B: Tensor
    """Index of the segment each block was cut from."""


@dataclass(frozen=True, eq=False)
class RoutingPlan:
    """See the module. Several segments may name one slot; their gradients are kept apart."""

    n_rows: int
    """Rows of the layers' input."""
    segments: tuple[Segment, ...]
    """Contiguous: the first starts at 0, each of the others where the one before it stops."""
    rows: Tensor | None = None
    """int64, (n_routed,): input row of each sorted position; None: the first n_routed rows, in order."""
    invariant: bool = True
    """Whether a row's result must not depend, to the bit, on which other segments there are. Training wants
    that; a decoding sampler may give it up for speed."""
    tiled: bool = False
    """Whether a row's result must not depend on the other rows of its segment either, nor on their number.
    Rows are in order then."""
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False, init=False)

    def __post_init__(self) -> None:
        stops = [0, *(segment.stop for segment in self.segments)]
        if any(
            s.start != stop or s.length < 1 or s.slot < 0
            for s, stop in zip(self.segments, stops, strict=False)
        ):
            raise ValueError(f"segments: {self.segments}; accepted: contiguous, not empty, with a slot")
        if self.tiled and self.rows is not None:
            raise ValueError("rows: of a tiled plan; accepted: None")
        if stops[-1] > self.n_rows or (self.rows is not None and len(self.rows) != stops[-1]):
            raise ValueError(
                f"rows: {stops[-1]} in segments; accepted: at most {self.n_rows}, one index each"
            )

    @classmethod
    def of(cls, slots_T: Sequence[int] | np.ndarray, device: torch.device | str = "cpu") -> "RoutingPlan":
        """The plan for rows with the slots `slots_T` (`NO_SLOT`: none); rows keep their order in a slot."""
        slots = np.asarray(slots_T, np.int64).reshape(-1)
        order = np.argsort(slots, kind="stable")
        order = order[slots[order] >= 0]
        segments, start = [], 0
        for slot, members in groupby(slots[order].tolist()):
            stop = start + len(list(members))
            segments.append(Segment(slot, start, stop))
            start = stop
        in_place = np.array_equal(order, np.arange(len(order)))
        rows = None if in_place else torch.as_tensor(order, device=device)
        return cls(len(slots), tuple(segments), rows)

    @property
    def n_routed(self) -> int:
        """Rows that use an adapter."""
        return self.segments[-1].stop if self.segments else 0

    @property
    def slots(self) -> tuple[int, ...]:
        """Slot of each segment."""
        return tuple(segment.slot for segment in self.segments)

    def blocks(
        self, block_rows: int, n_blocks: int | None = None, device: torch.device | str = "cpu"
    ) -> Blocks:
        """The segments in blocks of at most `block_rows` rows, padded to `n_blocks`; made once, then kept.

        Raises:
            ValueError: there are more than `n_blocks`.
        """
        return self.cached(
            ("blocks", block_rows, n_blocks, str(device)), lambda: self._cut(block_rows, n_blocks, device)
        )

    def cached(self, key: Hashable, make: Callable[[], Cached]) -> Cached:
        """What `make` gives, made once a plan: tables that an implementation derives from it."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def _cut(self, block_rows: int, n_blocks: int | None, device: torch.device | str) -> Blocks:
        table = [
            (segment.slot, start, min(block_rows, segment.stop - start), index)
            for index, segment in enumerate(self.segments)
            for start in range(segment.start, segment.stop, block_rows)
        ]
        spare = 0 if n_blocks is None else n_blocks - len(table)
        if spare < 0:
            raise ValueError(f"n_blocks: {n_blocks}; accepted: at least {len(table)}")
        table += [(NO_SLOT, 0, 0, NO_SLOT)] * spare
        columns = torch.tensor(table, dtype=torch.int32, device=device).reshape(-1, 4).T.contiguous()
        return Blocks(*columns)
