"""Calls environments from an event loop: in threads, and for no longer than they may take.

Environments are foreign code. One that hangs must cost its own episode and no other: so it is called
in a thread that can be given up. Steps of environments in this process are made one after the other
(threads would not make Python faster, and what they share, such as global random numbers, is safe);
those that wait for something elsewhere say so by the attribute `concurrent = True`.
"""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[Callable[[Any], Any], Any, asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class _Worker:
    """A daemon thread: one that hangs does not keep the process from ending."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def begin(self, job: _Job | None) -> None:
        """Do a job next; None: end."""
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            method, argument, loop, future = job
            try:
                result, error = method(argument), None
            except BaseException as raised:  # noqa: BLE001 - it is raised again where it is waited for
                result, error = None, raised
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the loop was closed: nobody waits any more


def _settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration) or not isinstance(error, Exception | SystemExit):
        # A future cannot hold the one; others (KeyboardInterrupt) would be taken for the user's.
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
    else:
        future.set_exception(error)


class Stepper:
    """Calls methods of environments; used within one event loop."""

    def __init__(self, seconds: float, concurrent: int = 64) -> None:
        """`seconds`: for one call; `concurrent`: calls of those that wait elsewhere, at a time."""
        self._seconds = seconds
        self._one_by_one = asyncio.Lock()
        self._several = asyncio.Semaphore(concurrent)
        self._idle: list[_Worker] = []

    async def call(self, method: Callable[[Any], T], argument: Any, of: object = None) -> T:
        """What `method(argument)` gives.

        `of`: the environment, if `method` is not its own. When it is cancelled, the thread is left alone.

        Raises:
            TimeoutError: it took too long; its thread is left alone.
            BaseException: what it raised.
        """
        subject = getattr(method, "__self__", None) if of is None else of
        async with self._several if getattr(subject, "concurrent", False) else self._one_by_one:
            worker = self._idle.pop() if self._idle else _Worker()
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Any] = loop.create_future()
            worker.begin((method, argument, loop, future))
            try:
                done, _ = await asyncio.wait({future}, timeout=self._seconds)
            except asyncio.CancelledError:
                worker.begin(None)  # should it ever come back, it ends
                raise
            if not done:
                future.cancel()
                worker.begin(None)
                name = getattr(method, "__name__", "it")
                raise TimeoutError(f"{name} took longer than {self._seconds:g} s")
            self._idle.append(worker)
            result: T = future.result()
            return result

    def close(self) -> None:
        """Let the threads end."""
        while self._idle:
            self._idle.pop().begin(None)
