"""What waits to be run: a lane of entries for each tenant and policy (or version), with bounds."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from opentinker_core.errors import UsageError
from opentinker_core.runtime.operations import REPLACES_STATE, Lane, Operation


@dataclass(frozen=True)
class Bound:
    """How much may wait in one scope."""

    operations: int
    size_bytes: int


@dataclass(frozen=True)
class QueueBounds:
    """How much may wait: of one policy or version, of one tenant, and of all tenants together."""

    lane: Bound = Bound(1024, 256 << 20)
    tenant: Bound = Bound(4096, 1 << 30)
    total: Bound = Bound(16384, 4 << 30)


DEFAULT_BOUNDS = QueueBounds()


@dataclass(frozen=True, eq=False)
class Entry:
    """A submitted operation."""

    number: int
    """Its place in the order of all submissions."""
    operation: Operation[Any]
    future: "Future[Any]" = field(default_factory=Future)


@dataclass
class _Load:
    """What waits in one scope."""

    operations: int = 0
    size_bytes: int = 0


class OperationQueue:
    """The lanes that are not empty. Not thread-safe: its owner holds a lock."""

    def __init__(self, bounds: QueueBounds = DEFAULT_BOUNDS) -> None:
        self._bounds = bounds
        self._lanes: dict[Lane, deque[Entry]] = {}
        self._loads: dict[str | Lane | None, _Load] = {}

    @property
    def lanes(self) -> Mapping[Lane, Sequence[Entry]]:
        """Of each lane that is not empty its entries, oldest first."""
        return self._lanes

    def __len__(self) -> int:
        return self._loads[None].operations if None in self._loads else 0

    def __iter__(self) -> Iterator[Entry]:
        return (entry for lane in self._lanes.values() for entry in lane)

    def check(self, operation: Operation[Any]) -> None:
        """Refuse what no empty queue could take.

        Raises:
            UsageError: it is larger than a bound.
        """
        limit = min(bound.size_bytes for _, _, bound in self._scopes(operation))
        if operation.size_bytes > limit:
            raise UsageError(
                f"size_bytes: {operation.size_bytes} of {operation} is not accepted; "
                f"accepted: at most {limit}"
            )

    def full(self, operation: Operation[Any]) -> str | None:
        """Which bound has no room for `operation`, and what waits there; None: there is room."""
        for key, scope, bound in self._scopes(operation):
            load = self._loads.get(key, _Load())
            if load.operations >= bound.operations:
                return f"{scope}: {load.operations} operations wait; accepted: at most {bound.operations}"
            if load.size_bytes + operation.size_bytes > bound.size_bytes:
                return (
                    f"{scope}: {load.size_bytes} bytes wait, {operation.size_bytes} more do not fit; "
                    f"accepted: at most {bound.size_bytes}"
                )
        return None

    def add(self, entry: Entry) -> None:
        """Put `entry` at the end of its lane."""
        self._lanes.setdefault(entry.operation.lane, deque()).append(entry)
        for key, _, _ in self._scopes(entry.operation):
            load = self._loads.setdefault(key, _Load())
            load.operations += 1
            load.size_bytes += entry.operation.size_bytes

    def take(self, entries: Iterable[Entry]) -> None:
        """Remove `entries`, each of which stands at the head of its lane when its turn comes."""
        for entry in entries:
            lane = self._lanes[entry.operation.lane]
            taken = lane.popleft()
            assert taken is entry
            if not lane:
                del self._lanes[entry.operation.lane]
            for key, _, _ in self._scopes(entry.operation):
                load = self._loads[key]
                load.operations -= 1
                load.size_bytes -= entry.operation.size_bytes
                if not load.operations:
                    del self._loads[key]

    def take_dependent(self, lane: Lane) -> list[Entry]:
        """Remove what waits in `lane` up to the first operation that replaces the policy's state."""
        dependent = []
        for entry in self._lanes.get(lane, ()):
            if entry.operation.kind in REPLACES_STATE:
                break
            dependent.append(entry)
        self.take(dependent)
        return dependent

    def take_all(self) -> list[Entry]:
        """Remove everything; in the order of submission."""
        entries = sorted(self, key=lambda entry: entry.number)
        self.take(entries)
        return entries

    def _scopes(self, operation: Operation[Any]) -> Iterator[tuple[str | Lane | None, str, Bound]]:
        tenant, subject = operation.lane
        yield operation.lane, f"{subject!r} of tenant {tenant!r}", self._bounds.lane
        yield tenant, f"tenant {tenant!r}", self._bounds.tenant
        yield None, "all tenants", self._bounds.total
