"""Leases: who has not been heard of for too long."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Holder = TypeVar("Holder", bound=Hashable)


class Leases(Generic[Holder]):
    """Leases of one length, in the order in which they run out: each operation takes the same time,
    however many there are.

    Args:
        seconds: how long a lease lasts after it was last renewed.
        clock: seconds that only grow; nobody can set them.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._ends: OrderedDict[Holder, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def renew(self, holder: Holder) -> None:
        """Let a lease last for `seconds` from now; begins it where there is none."""
        self._ends[holder] = self._clock() + self.seconds
        self._ends.move_to_end(holder)

    def suspend(self, holder: Holder) -> None:
        """Take a lease out: its holder is being served, or gone."""
        self._ends.pop(holder, None)

    def has(self, holder: Holder) -> bool:
        """Whether the lease runs."""
        return holder in self._ends

    def expired(self) -> list[Holder]:
        """Take out those that have run out; each is given once."""
        now = self._clock()
        gone: list[Holder] = []
        for holder, end in self._ends.items():
            if end > now:
                break
            gone.append(holder)
        for holder in gone:
            del self._ends[holder]
        return gone

    def until_next(self) -> float:
        """Seconds until the next one can run out, at most; `seconds` where there is none."""
        first = next(iter(self._ends.values()), None)
        return self.seconds if first is None else max(0.0, first - self._clock())
