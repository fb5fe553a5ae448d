"""Sessions: one environment each, whose calls are numbered, and which ends when its lease does.

A call that comes again with the same number and the same content gets the first one's answer, also while
that is not there yet: an answer that was lost on its way is asked for again, and no step is taken twice.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from envs.serving.config import ServerConfig
from envs.serving.errors import Code, Reason, Refusal
from envs.serving.keys import Owner
from envs.serving.leases import Leases
from envs.serving.metrics import Metrics
from envs.serving.shards import Shard, ShardEndedError, Shards

_LOG = logging.getLogger(__name__)

_REMEMBERED = 1024
"""Ended sessions whose reason can still be told."""

SessionId = tuple[Owner, str]
"""Names are the clients' own: two keys may use the same one without knowing of each other."""

_WHY = {
    Reason.CLOSED: "it was closed",
    Reason.LEASE_EXPIRED: "nothing was heard of its client for longer than its lease",
    Reason.CALL_TIMED_OUT: "a call took longer than calls may",
    Reason.SHARD_ENDED: "the process that it ran in ended",
    Reason.NOT_OPENED: "it could not be opened",
    Reason.STOPPED: "the server was stopped",
    Reason.UNKNOWN: "there is none of this name",
}


@dataclass(eq=False)
class Session:
    """An environment that runs on a shard for a client."""

    id: SessionId
    number: int
    """The shard's name for it."""
    shard: Shard
    opened: bool = False
    called: int = -1
    """The number of the last call; opening it is number 0."""
    digest: bytes = b""
    """Of the last call's content."""
    answer: "asyncio.Task[bytes] | None" = None
    """The last call's."""

    @property
    def busy(self) -> bool:
        """Whether a call runs."""
        return self.answer is not None and not self.answer.done()


class Sessions:
    """All sessions of a server.

    Args:
        clock: seconds that only grow, for the leases.
    """

    def __init__(
        self, config: ServerConfig, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._metrics = config, metrics
        self.shards = Shards(config.shards, config.max_answer_bytes, self._shard_ended, metrics.restarted)
        self._sessions: dict[SessionId, Session] = {}
        self._held: dict[Owner, int] = {}
        self._ended: OrderedDict[SessionId, Reason] = OrderedDict()
        self._leases: Leases[SessionId] = Leases(config.lease_s, clock)
        self._numbers = itertools.count(1)
        self._closing: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        metrics.gauge("sessions", "Sessions that are open.", lambda: len(self._sessions))
        metrics.gauge(
            "sessions_remembered", "Ended sessions of which is known why.", lambda: len(self._ended)
        )
        metrics.gauge("closing", "Environments that are being closed.", lambda: len(self._closing))
        metrics.gauge("shards", "Shards that take calls.", lambda: self.shards.alive)

    async def start(self) -> None:
        """Start the shards. Raises RuntimeError where they end at once."""
        await self.shards.start()
        self._sweeper = asyncio.create_task(self._sweep())

    async def check(self, environments: Sequence[str]) -> None:
        """Look whether what is to be served is there; which arguments it needs, clients will hear.

        Raises:
            ValueError: an id is unknown, or cannot be imported.
        """
        for id in environments:
            try:
                await self.once({"do": "describe", "id": id, "split": "train", "args": {}})
            except Refusal as refusal:
                if str(refusal).startswith("environment: "):  # as `envs.registry` says it of an id
                    raise ValueError(str(refusal)) from refusal
                _LOG.warning("%s cannot be made without arguments: %s", id, refusal)

    async def stop(self) -> None:
        """End every session; its environment is closed."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for session in list(self._sessions.values()):
            self._forget(session, Reason.STOPPED)  # the shards close all environments that they have
        await self.shards.stop()

    async def open(self, id: SessionId, making: dict[str, Any], content: bytes) -> bytes:
        """Begin a session, or give the answer again if it has just been begun so.

        Raises:
            Refusal: too many sessions, another session of this name, or the environment cannot be made.
        """
        session = self._sessions.get(id)
        if session is None:
            session = self._added(id)
            return await self._run(session, 0, content, {"do": "open"} | making)
        return await self._again(session, 0, content)

    async def call(self, id: SessionId, number: int, content: bytes, request: dict[str, Any]) -> bytes:
        """Take call `number` of a session, or give its answer again if it was the last one.

        Raises:
            Refusal: the session has ended, the number is not the next one, or the environment raised.
        """
        session = self._sessions.get(id)
        if session is None:
            raise self._lost(id)
        if number == session.called:
            return await self._again(session, number, content)
        if number != session.called + 1 or session.busy or not session.opened:
            running = ", which still runs" if session.busy else ""
            raise Refusal(
                Code.OUT_OF_ORDER,
                f"number: {number} is not accepted; the last call was {session.called}{running}",
            )
        return await self._run(session, number, content, request)

    async def once(self, making: dict[str, Any]) -> bytes:
        """Let any shard do what belongs to no session.

        Raises:
            Refusal: it failed.
        """
        try:
            answer = await self.shards.least().ask(making, self._config.call_s)
        except ShardEndedError as ended:
            why = _WHY[ended.reason]
            raise Refusal(Code.CALL_FAILED, f"{making['do']}: {why}", reason=str(ended.reason)) from ended
        return answer.raise_for_outcome()

    def renew(self, id: SessionId) -> Reason | None:
        """Hear of a session's client; gives why the session has ended, if it has."""
        session = self._sessions.get(id)
        if session is None:
            return self._ended.get(id, Reason.UNKNOWN)
        if not session.busy:
            self._leases.renew(id)
        return None

    def close(self, id: SessionId) -> None:
        """End a session; nothing happens if it has ended."""
        session = self._sessions.get(id)
        if session is not None:
            self._end(session, Reason.CLOSED)

    def _added(self, id: SessionId) -> Session:
        owner, config = id[0], self._config
        if len(self._sessions) + len(self._closing) >= config.max_sessions:
            raise Refusal(
                Code.TOO_MANY_SESSIONS,
                f"{config.max_sessions} sessions are open; accepted: so many at a time",
            )
        if self._held.get(owner, 0) >= config.max_sessions_per_key:
            most = config.max_sessions_per_key
            raise Refusal(
                Code.TOO_MANY_SESSIONS, f"this key has {most} sessions open; accepted: so many at a time"
            )
        session = Session(id, next(self._numbers), self.shards.least())
        session.shard.sessions.add(session)
        self._sessions[id] = session
        self._held[owner] = self._held.get(owner, 0) + 1
        self._ended.pop(id, None)
        self._metrics.opened()
        return session

    async def _again(self, session: Session, number: int, content: bytes) -> bytes:
        if session.called != number or session.digest != _digest(content) or session.answer is None:
            raise Refusal(
                Code.OUT_OF_ORDER, f"number: {number} was another call; the last call was {session.called}"
            )
        if not session.busy:
            self._leases.renew(session.id)
        return await asyncio.shield(session.answer)

    async def _run(self, session: Session, number: int, content: bytes, request: dict[str, Any]) -> bytes:
        """Run a call to its end, whether its client waits for it or not."""
        session.called, session.digest = number, _digest(content)
        session.answer = asyncio.create_task(self._answered(session, request))
        session.answer.add_done_callback(_retrieved)
        return await asyncio.shield(session.answer)

    async def _answered(self, session: Session, request: dict[str, Any]) -> bytes:
        began = time.monotonic()
        self._leases.suspend(session.id)
        try:
            answer = await session.shard.ask(request | {"session": session.number}, self._config.call_s)
            payload = answer.raise_for_outcome()
            session.opened = True
            return payload
        except ShardEndedError as ended:
            self._end(session, ended.reason)
            raise self._lost(session.id) from ended
        except Refusal:
            if not session.opened:
                self._end(session, Reason.NOT_OPENED)  # what it shows may be wrong, not its making
            raise
        finally:
            self._metrics.called(request["do"], time.monotonic() - began)
            if self._sessions.get(session.id) is session:
                self._leases.renew(session.id)

    def _end(self, session: Session, reason: Reason) -> None:
        """Forget a session and have its environment closed."""
        if not self._forget(session, reason) or session.shard.ended:
            return
        closing = asyncio.create_task(self._close(session))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close(self, session: Session) -> None:
        """Close the environment, after the call that may still run. Who hangs in it loses the shard."""
        with contextlib.suppress(ShardEndedError):  # then there is nothing left to close
            await session.shard.ask({"do": "close", "session": session.number}, self._config.call_s)

    def _forget(self, session: Session, reason: Reason) -> bool:
        """Take a session out of all tables; gives whether it was there."""
        if self._sessions.get(session.id) is not session:
            return False
        del self._sessions[session.id]
        self._leases.suspend(session.id)
        session.shard.sessions.discard(session)
        owner = session.id[0]
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._ended[session.id] = reason
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        self._metrics.ended(reason)
        return True

    def _shard_ended(self, shard: Shard) -> None:
        for session in list(shard.sessions):
            self._forget(session, Reason.SHARD_ENDED)

    def _lost(self, id: SessionId) -> Refusal:
        reason = self._ended.get(id, Reason.UNKNOWN)
        return Refusal(Code.SESSION_LOST, f"the session has ended: {_WHY[reason]}", reason=str(reason))

    async def _sweep(self) -> None:
        """End sessions whose lease has run out."""
        while True:
            for id in self._leases.expired():
                if (session := self._sessions.get(id)) is not None:
                    self._end(session, Reason.LEASE_EXPIRED)
            await asyncio.sleep(min(1.0, self._leases.until_next() + 0.001))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _retrieved(task: "asyncio.Task[bytes]") -> None:
    """Look at what a call raised: its client may have left, and asyncio would complain."""
    if not task.cancelled():
        task.exception()
