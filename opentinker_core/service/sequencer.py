"""The order of one model's requests: by `seq_id`, whenever they arrive."""

import asyncio
from collections.abc import Awaitable, Callable

Launch = Callable[[], Awaitable[None]]
"""Hands a request to the engine, or finds that it cannot be; returns when the next may follow."""


class Sequencer:
    """Launches requests one after the other in the order of their numbers, which have no gaps.

    What arrives early waits, however long: the client may be computing what fills the gap.
    """

    def __init__(self, first: int = 1) -> None:
        self._next = first
        self._waiting: dict[int, Launch] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def next(self) -> int:
        """The number that is launched next."""
        return self._next

    @property
    def waiting(self) -> int:
        """Requests that arrived early, or are about to be launched."""
        return len(self._waiting)

    def is_past(self, number: int) -> bool:
        """Whether `number` was launched, refused or is waiting already."""
        return number < self._next or number in self._waiting

    def put(self, number: int, launch: Launch) -> None:
        """Launch it when its turn comes; `number` is not past."""
        self._waiting[number] = launch
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def consume(self, number: int) -> None:
        """Note that `number` was refused for good: those behind it do not wait for it."""
        if not self.is_past(number):
            self.put(number, _nothing)

    def close(self) -> None:
        """Launch nothing more."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while (launch := self._waiting.pop(self._next, None)) is not None:
                self._next += 1
                await launch()
        finally:
            self._task = None


async def _nothing() -> None:
    """What a refused request launches."""
