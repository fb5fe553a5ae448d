"""Shards: processes that run environments; one that ends or hangs is replaced, with what ran in it lost."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from envs.serving import wire
from envs.serving.errors import Code, Reason, Refusal
from envs.serving.keys import KEY_VARIABLE, KEYS_VARIABLE

_LOG = logging.getLogger(__name__)

_START_S = 60.0
"""How long a shard may take to import what it needs."""
_CLOSE_S = 5.0
"""How long shards may take to close their environments when the server stops."""
_SHORT_LIFE_S = 5.0
_SLOWEST_RESTART_S = 10.0
_FIRST_RESTART_S = 0.1


class ShardEndedError(Exception):
    """The shard's process ended before it had answered; `reason`: by itself, or because it took too long."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True)
class Answer:
    """What a shard said: one of the outcomes of `wire`, and JSON as it goes to the client."""

    outcome: int
    payload: bytes

    def raise_for_outcome(self) -> bytes:
        """The payload of a call that is done.

        Raises:
            Refusal: the environment cannot be made, raised, or answered nonsense.
        """
        if self.outcome == wire.OK:
            return self.payload
        said = json.loads(self.payload)
        if self.outcome == wire.REFUSED:
            raise Refusal(Code.REFUSED_ARGUMENTS, said["message"])
        if self.outcome == wire.BROKEN:
            raise Refusal(Code.ENVIRONMENT_BROKEN, f"the environment broke its protocol: {said['message']}")
        raise Refusal(
            Code.ENVIRONMENT_RAISED,
            said["message"],
            type=said["type"],
            is_value_error=said["is_value_error"],
        )


@dataclass(eq=False)
class Shard:
    """One process. Calls wait for one another, in the order in which they came."""

    index: int
    process: "subprocess.Popen[bytes]"
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    largest: int
    sessions: set[Any] = field(default_factory=set)
    """Those who have an environment here."""
    ended: bool = False
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: "asyncio.Future[Answer] | None" = None

    async def ask(self, request: dict[str, Any], seconds: float) -> Answer:
        """Let the shard do something.

        Args:
            seconds: counted from when it begins; then the process is killed.

        Raises:
            ShardEndedError: the process ended, or was killed.
        """
        async with self._turn:
            if self.ended:
                raise ShardEndedError(Reason.SHARD_ENDED)
            self._waiting = asyncio.get_running_loop().create_future()
            self.writer.write(json.dumps(request).encode() + b"\n")
            try:
                async with asyncio.timeout(seconds):
                    return await self._waiting
            except TimeoutError:
                _LOG.warning("shard %d: a %s took longer than %g s", self.index, request["do"], seconds)
                self.kill()
                raise ShardEndedError(Reason.CALL_TIMED_OUT) from None
            except asyncio.CancelledError:
                self.kill()  # what it would answer would be taken for the answer to the next call
                raise
            finally:
                self._waiting = None

    async def listen(self) -> None:
        """Hand on what the process answers, until it ends."""
        try:
            while True:
                length, outcome = wire.FRAME.unpack(await self.reader.readexactly(wire.FRAME.size))
                if length > self.largest + 4096:
                    break
                answer = Answer(outcome, await self.reader.readexactly(length))
                if self._waiting is None or self._waiting.done():
                    break  # it said something that nobody asked for
                self._waiting.set_result(answer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.kill()
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_exception(ShardEndedError(Reason.SHARD_ENDED))
                self._waiting.exception()  # who waits may be cancelled, and asyncio would complain

    def kill(self) -> None:
        """End the process and those it has started, at once."""
        self.ended = True
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.writer.close()


class Shards:
    """A number of shards, each replaced when it ends.

    Args:
        on_end: called with a shard whose process has ended.
    """

    def __init__(
        self, count: int, largest_answer: int, on_end: Callable[[Shard], None], on_restart: Callable[[], None]
    ) -> None:
        self._count, self._largest = count, largest_answer
        self._on_end, self._on_restart = on_end, on_restart
        self._shards: dict[int, Shard] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False

    @property
    def alive(self) -> int:
        """How many take calls."""
        return sum(not shard.ended for shard in self._shards.values())

    @property
    def pids(self) -> list[int]:
        """Process ids of those that are alive."""
        return [shard.process.pid for shard in self._shards.values() if not shard.ended]

    async def start(self) -> None:
        """Start them all.

        Raises:
            RuntimeError: one ended at once; what it said stands in stderr.
        """
        started = [asyncio.Event() for _ in range(self._count)]
        self._keepers = [
            asyncio.create_task(self._keep(index, event), name=f"shard {index}")
            for index, event in enumerate(started)
        ]
        for event in started:
            await event.wait()
        if not self.alive:
            await self.stop()
            raise RuntimeError("the shards ended at their start")

    async def stop(self) -> None:
        """Let every shard close its environments, and end."""
        self._stopping = True
        for shard in list(self._shards.values()):
            if not shard.ended:
                shard.writer.write_eof()
        if self._keepers:
            _, late = await asyncio.wait(self._keepers, timeout=_CLOSE_S)
            for shard in self._shards.values():
                shard.kill()
            for keeper in late:
                keeper.cancel()
            await asyncio.gather(*self._keepers, return_exceptions=True)

    def least(self) -> Shard:
        """The one with the fewest sessions.

        Raises:
            Refusal: none is alive.
        """
        alive = [shard for shard in self._shards.values() if not shard.ended]
        if not alive or self._stopping:
            raise Refusal(Code.UNAVAILABLE, "no shard takes sessions now; ask again in a moment")
        return min(alive, key=lambda shard: len(shard.sessions))

    async def _keep(self, index: int, started: asyncio.Event) -> None:
        """Run a shard, and another when it has ended."""
        delay = _FIRST_RESTART_S
        while not self._stopping:
            began = time.monotonic()
            try:
                await self._run(await self._start(index), started)
            except OSError as error:
                _LOG.error("shard %d: no process can be started: %s", index, error)
            started.set()
            if self._stopping:
                break
            if time.monotonic() - began > _SHORT_LIFE_S:
                delay = _FIRST_RESTART_S
            await asyncio.sleep(delay)
            delay = min(2 * delay, _SLOWEST_RESTART_S)
            self._on_restart()

    async def _run(self, shard: Shard, started: asyncio.Event) -> None:
        """Let a shard take calls until its process has ended."""
        listening = asyncio.create_task(shard.listen())
        try:
            await shard.ask({"do": "ping"}, _START_S)
            self._shards[shard.index] = shard
            started.set()
        except ShardEndedError:
            _LOG.error("shard %d: it ended at its start", shard.index)
        await listening
        code = await asyncio.to_thread(shard.process.wait)
        if not self._stopping:
            lost = len(shard.sessions)
            _LOG.warning("shard %d: it ended with code %d; sessions lost: %d", shard.index, code, lost)
        self._on_end(shard)

    async def _start(self, index: int) -> Shard:
        own, its = socket.socketpair()
        with its:
            its.set_inheritable(True)
            command = [
                sys.executable,
                "-P",
                "-m",
                "envs.serving.worker",
                str(its.fileno()),
                str(self._largest),
            ]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                env=_environment(),
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=own)
        return Shard(index, process, reader, writer, self._largest)


def _environment() -> dict[str, str]:
    """Variables of a shard: the code of environments shall not see keys."""
    variables = {
        name: value for name, value in os.environ.items() if name not in (KEYS_VARIABLE, KEY_VARIABLE)
    }
    path = os.pathsep.join(os.path.abspath(path) for path in sys.path)  # noqa: PTH100
    return variables | {"PYTHONPATH": path}
