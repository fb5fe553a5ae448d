"""Calls environments from an event loop: in threads, and for no longer than they may take.

Environments are foreign code. One that hangs must cost its own episode and no other: so it is called
in a thread that can be given up. Steps of environments in this process are made one after the other
(threads would not make Python faster, and what they share, such as global random numbers, is safe);
those that wait for something elsewhere say so by the attribute `concurrent = True`.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")


class _Call:
    """A function that is to be called, and who waits for it."""

    def __init__(self, method: Callable[[Any], Any], argument: Any, future: "asyncio.Future[Any]") -> None:
        self.method, self.argument, self.future = method, argument, future
        self.result: Any = None
        self.error: BaseException | None = None

    def make(self) -> None:
        """In a thread."""
        try:
            self.result = self.method(self.argument)
        except BaseException as raised:  # noqa: BLE001 - it is raised again where it is waited for
            self.error = raised

    def settle(self) -> None:
        """In the event loop: tell who waits."""
        error = self.error
        if self.future.done():
            return
        if error is None:
            self.future.set_result(self.result)
        elif isinstance(error, StopIteration) or not isinstance(error, Exception | SystemExit):
            # A future cannot hold the one; others (KeyboardInterrupt) would be taken for the user's.
            self.future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            self.future.set_exception(error)


class _Threads:
    """Makes calls in the order in which they came, `size` at a time, each for `seconds` at most.

    A thread and the event loop wake each other once for all that has gathered: with a handover for each
    call, most of the time of a rollout with quick environments went there. The threads are daemons: one
    that hangs does not keep the process from ending.
    """

    def __init__(self, seconds: float, size: int) -> None:
        self._seconds, self._size = seconds, size
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._running: dict[_Call, float] = {}
        """What each thread is at, and when it began."""
        self._threads = 0
        """That take calls: those that were given up are not counted."""
        self._idle = 0
        """That wait, and have not been told of anything."""
        self._made: list[_Call] = []
        """Not yet settled."""
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.TimerHandle | None = None

    async def call(self, method: Callable[[Any], Any], argument: Any) -> Any:
        """See `Stepper.call`."""
        self._loop = asyncio.get_running_loop()
        call = _Call(method, argument, self._loop.create_future())
        with self._changed:
            self._waiting.append(call)
            self._employ()
        if self._watch is None:
            self._watch = self._loop.call_later(self._seconds, self._look)
        try:
            return await call.future
        except asyncio.CancelledError:
            self._give_up(call)
            raise

    def close(self) -> None:
        """Let the threads end, those that hang when they come back."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._watch is not None:
            self._watch.cancel()

    def _employ(self) -> None:
        """Have a thread take what waits; the lock is held."""
        if self._idle:
            self._idle -= 1
            self._changed.notify()
        elif self._threads < self._size:
            self._threads += 1
            threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _work(self) -> None:
        call = self._next(None)
        while call is not None:
            call.make()
            call = self._next(call)

    def _next(self, made: _Call | None) -> _Call | None:
        """Hand over what a thread has made; what it is to do next, None: it is to end."""
        with self._changed:
            if made is not None:
                if self._running.pop(made, None) is None:
                    return None  # it was given up, and another thread has taken its place
                self._made.append(made)
                if len(self._made) == 1 and not self._wake():
                    return None
            while not self._waiting and not self._closed:
                self._idle += 1
                self._changed.wait()
            if self._closed:
                return None
            call = self._waiting.popleft()
            self._running[call] = monotonic()
            return call

    def _wake(self) -> bool:
        """Have the event loop settle what was made; False: it was closed, and nobody waits any more."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._settle)
        except RuntimeError:
            return False
        return True

    def _settle(self) -> None:
        with self._changed:
            made, self._made = self._made, []
        for call in made:
            call.settle()

    def _look(self) -> None:
        """Give up what has taken too long; look again when the next may have."""
        assert self._loop is not None
        with self._changed:
            now = monotonic()
            late = [call for call, began in self._running.items() if now - began >= self._seconds]
            # what waits may begin at any moment, so that it is late no sooner than what would begin now
            ends = [began for call, began in self._running.items() if call not in late]
            more = bool(self._waiting or ends)
        for call in late:
            self._give_up(call)
            if not call.future.done():
                name = getattr(call.method, "__name__", "it")
                call.future.set_exception(TimeoutError(f"{name} took longer than {self._seconds:g} s"))
        wait = min(ends, default=now) + self._seconds - now
        self._watch = self._loop.call_later(wait, self._look) if more else None

    def _give_up(self, call: _Call) -> None:
        """Nobody waits for it any more: it is not begun, or its thread is left alone and replaced."""
        with self._changed:
            if self._running.pop(call, None) is not None:
                self._threads -= 1
                if self._waiting:
                    self._employ()
            elif call in self._waiting:
                self._waiting.remove(call)


class Stepper:
    """Calls methods of environments; used within one event loop."""

    def __init__(self, seconds: float, concurrent: int = 64) -> None:
        """`seconds`: for one call; `concurrent`: calls of those that wait elsewhere, at a time."""
        self._one_by_one = _Threads(seconds, 1)
        self._several = _Threads(seconds, concurrent)

    async def call(self, method: Callable[[Any], T], argument: Any, of: object = None) -> T:
        """What `method(argument)` gives.

        `of`: the environment, if `method` is not its own. When it is cancelled, the thread is left alone.

        Raises:
            TimeoutError: it took too long; its thread is left alone.
            BaseException: what it raised.
        """
        subject = getattr(method, "__self__", None) if of is None else of
        threads = self._several if getattr(subject, "concurrent", False) else self._one_by_one
        result: T = await threads.call(method, argument)
        return result

    def close(self) -> None:
        """Let the threads end."""
        self._one_by_one.close()
        self._several.close()
