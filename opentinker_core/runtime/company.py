"""Which clients the next batch waits for, so that clients that wait for their results share passes.

Two clients that each submit only after they were answered would take turns for ever: when one is
answered, the other's operation waits already, and would start alone. So a batch that has room waits
a moment for the lanes that were just answered. It does so only for those that came back in time after
an operation of that kind the last time; who thinks for longer is not waited for again.
"""

import time
from collections.abc import Collection, Iterable

from opentinker_core.runtime.operations import Kind, Lane, Operation

_REMEMBERED = 4096
"""Slow lanes that are remembered; beyond that all are forgotten, and given another chance."""


class Company:
    """Whom to wait for. Not thread-safe: its owner holds a lock."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long after its answer a client is waited for at most."""
        self._seconds = seconds
        self._absent: dict[Lane, tuple[Kind, float]] = {}
        """Of lanes that were answered and have nothing waiting: after what, and when they are late."""
        self._slow: set[tuple[Lane, Kind]] = set()

    def answered(self, operations: Iterable["Operation[object]"], waiting: Collection[Lane]) -> None:
        """Say that `operations` got their results, while the lanes `waiting` have others in the queue."""
        now = time.monotonic()
        for lane, (kind, late) in list(self._absent.items()):
            if late <= now:
                self._note(lane, kind, in_time=False)
        for operation in operations:
            if operation.lane not in waiting:
                self._absent[operation.lane] = (operation.kind, now + self._seconds)

    def arrived(self, lane: Lane) -> None:
        """Say that an operation of `lane` was submitted."""
        if lane in self._absent:
            kind, late = self._absent[lane]
            self._note(lane, kind, in_time=time.monotonic() < late)

    def patience(self) -> float:
        """Seconds for which somebody is worth waiting for; 0 or less: nobody is."""
        promising = [late for lane, (kind, late) in self._absent.items() if (lane, kind) not in self._slow]
        return max(promising) - time.monotonic() if promising else 0.0

    def _note(self, lane: Lane, kind: Kind, *, in_time: bool) -> None:
        del self._absent[lane]
        if in_time:
            self._slow.discard((lane, kind))
            return
        if len(self._slow) >= _REMEMBERED:
            self._slow.clear()
        self._slow.add((lane, kind))
