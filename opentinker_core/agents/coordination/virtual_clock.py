"""An event loop whose time passes only when nothing is left to do: hours of waiting cost nothing.

What runs on it is deterministic, and a dead-lock is found at once.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from opentinker_core.errors import OpenTinkerError

T = TypeVar("T")


class DeadlockError(OpenTinkerError):
    """Everything waits, and nothing will ever come."""


class _JumpingSelector(selectors.DefaultSelector):
    """Where a loop would sleep until its next timer, jumps there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise DeadlockError("everything waits, and there is no deadline")
        self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """For code that waits for timers and for its own tasks only, not for threads or the network."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Seconds since the loop was made, as far as anything waited for them."""
        return self._jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, on a clock of its own.

    Raises:
        DeadlockError: it waits for what never comes.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
