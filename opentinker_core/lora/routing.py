"""Which adapters a forward pass applies to which of its rows; it travels in a context, per call."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from opentinker_core.errors import OpenTinkerError
from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.layout import Group
from opentinker_core.lora.pool import AdapterPool, Bucket, Slot
from opentinker_kernels.plan import RoutingPlan, Segment


@dataclass(frozen=True, eq=False)
class Rows:
    """Adjacent input rows that use one adapter, or the base model alone."""

    count: int
    slot: Slot | None
    gradient: Adapter | None = None
    """Where the gradient of the adapter's factors is added to, if it is wanted."""
    tiled: bool = False
    """Whether a row's result must not depend on the others, nor on their number (see `RoutingPlan`)."""


@dataclass(frozen=True, eq=False)
class Part:
    """Rows whose adapters lie in one bucket and target one group of layers."""

    rows: slice
    bucket: Bucket
    plan: RoutingPlan
    gradients: tuple[Adapter | None, ...]
    """Of each segment."""


class Routing:
    """What the LoRA layers apply to the rows of one forward pass, and of its backward pass.

    Rows of one slot, and slots of one rank bucket, should be adjacent: each break is one more product.
    """

    def __init__(self, pool: AdapterPool, rows: Sequence[Rows], *, invariant: bool = True) -> None:
        """`rows` cover the input, in order. Without `invariant` those of one slot become one segment."""
        self._pool = pool
        self._rows = rows if invariant else _merged(rows)
        self._invariant = invariant
        self.n_rows = sum(row.count for row in rows)
        self._parts: dict[tuple[bool, ...], tuple[Part, ...]] = {}
        self._targets = [
            frozenset(pool.layout_of(row.slot).factors) if row.slot else None for row in self._rows
        ]
        self.pending: dict[Group, tuple[Tensor, dict[str, Tensor]]] = {}
        """Outputs of a group's layers, computed with the first of them, and the input they are of."""

    def parts(self, group: Group) -> tuple[Part, ...]:
        """The rows that get an update from a group of layers."""
        names = group.names
        active = tuple(targets is not None and not targets.isdisjoint(names) for targets in self._targets)
        if active not in self._parts:
            self._parts[active] = tuple(self._find_parts(active))
        return self._parts[active]

    def _find_parts(self, active: tuple[bool, ...]) -> Iterator[Part]:
        start = 0
        kinds = [
            (row.slot.rank, row.tiled) if row.slot and on else None
            for row, on in zip(self._rows, active, strict=True)
        ]
        for kind, members in groupby(zip(kinds, self._rows, strict=True), key=lambda pair: pair[0]):
            rows = [row for _, row in members]
            stop = start + sum(row.count for row in rows)
            if kind is not None:
                rank, tiled = kind
                plan = RoutingPlan(stop - start, _segments(rows), invariant=self._invariant, tiled=tiled)
                gradients = tuple(row.gradient for row in rows)
                yield Part(slice(start, stop), self._pool.bucket(rank), plan, gradients)
            start = stop


def _segments(rows: Sequence[Rows]) -> tuple[Segment, ...]:
    segments, start = [], 0
    for row in rows:
        assert row.slot is not None
        segments.append(Segment(row.slot.index, start, start + row.count))
        start += row.count
    return tuple(segments)


def _merged(rows: Sequence[Rows]) -> list[Rows]:
    return [Rows(sum(r.count for r in same), slot) for slot, same in groupby(rows, key=lambda row: row.slot)]


class _Unset:
    """Marks a forward pass for which nobody said what applies."""


_active: ContextVar[Routing | type[_Unset] | None] = ContextVar("routing", default=_Unset)


@contextmanager
def routed(routing: Routing | None) -> Iterator[None]:
    """Run forward passes with `routing`, or with the base model alone where it is None."""
    token = _active.set(routing)
    try:
        yield
    finally:
        _active.reset(token)


def same_routing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For `torch.utils.checkpoint`: the contexts of a first run and of the second, which gets its routing."""
    routing = _active.get()
    return nullcontext(), nullcontext() if isinstance(routing, type) else routed(routing)


def active_routing(layer: str) -> Routing | None:
    """What `routed` set.

    Raises:
        OpenTinkerError: outside of it: silently serving the base model instead of a policy is the
            worst of faults.
    """
    routing = _active.get()
    if isinstance(routing, type):
        raise OpenTinkerError(f"{layer}: forward pass without `routed(...)`")
    return routing
