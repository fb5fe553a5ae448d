"""Counts of what a scheduler did: KindStatistics, Statistics."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from opentinker_core.runtime.operation_queue import Entry
from opentinker_core.runtime.operations import Kind
from opentinker_core.runtime.residency_statistics import Residency


@dataclass(frozen=True)
class KindStatistics:
    """The operations of one kind since the scheduler started."""

    waiting: int
    running: int
    done: int
    failed: int
    """Those that were not run because of another's failure included."""
    cancelled: int
    """Before they ran; counted when their turn would have come."""
    batch_sizes: dict[int, int]
    """Operations run together -> how often."""
    tokens: int = 0
    """That were put through the base model; those of operations that go on included."""


@dataclass(frozen=True)
class Statistics:
    """What waits, runs and ran; of every kind."""

    kinds: dict[Kind, KindStatistics]
    residency: Residency | None = None
    """What the engine's tiers hold; None: whoever asked looked at the scheduler alone."""

    @property
    def waiting(self) -> int:
        """Operations that wait."""
        return sum(kind.waiting for kind in self.kinds.values())


class Tally:
    """Counts while the scheduler runs. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._ended: Counter[tuple[Kind, str]] = Counter()
        self._sizes: dict[Kind, Counter[int]] = {kind: Counter() for kind in Kind}
        self._tokens: Counter[Kind] = Counter()

    def ran(self, kind: Kind, size: int) -> None:
        """Count a batch of `size` operations."""
        self._sizes[kind][size] += 1

    def ended(self, kind: Kind, how: str) -> None:
        """Count an operation that is `done`, `failed` or `cancelled`."""
        self._ended[kind, how] += 1

    def went(self, kind: Kind, tokens: int) -> None:
        """Count tokens that went through the base model."""
        self._tokens[kind] += tokens

    def statistics(self, waiting: Iterable[Entry], running: Iterable[Entry]) -> Statistics:
        """A copy that stays as it is."""
        waiting_kinds = Counter(entry.operation.kind for entry in waiting)
        running_kinds = Counter(entry.operation.kind for entry in running)
        return Statistics(
            {
                kind: KindStatistics(
                    waiting=waiting_kinds[kind],
                    running=running_kinds[kind],
                    done=self._ended[kind, "done"],
                    failed=self._ended[kind, "failed"],
                    cancelled=self._ended[kind, "cancelled"],
                    batch_sizes=dict(self._sizes[kind]),
                    tokens=self._tokens[kind],
                )
                for kind in Kind
            }
        )
