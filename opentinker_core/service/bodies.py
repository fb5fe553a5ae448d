"""Bodies of requests: read whole, within bounds, and decompressed, before a route sees anything of them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import zstandard
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opentinker_core.config.serving import LimitsConfig
from opentinker_core.service.errors import Refused, TooLarge, UnsupportedMedia, answer_for
from opentinker_core.service.incoming import BodyTimeout, Incoming, header
from opentinker_core.service.routes import ARRAYS

_MB = 10**6
_SMALL = 1 * _MB
"""Bodies up to this size do not wait for room, and are decompressed where the loop runs."""
_OBJECTS = 1 << 16
"""Objects in a body of JSON."""
_SLICE = 256
"""Bytes that are decompressed at a time; they become 8 MB at most."""
_WINDOW = 1 << 25
"""The largest window of a zstd frame; RFC 8878 asks for 8 MB."""


class Room:
    """Bytes of bodies that may be in memory at once; who comes first goes first."""

    def __init__(self, size: int) -> None:
        self._free = self._size = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[Callable[[int], None]]:
        """Hold room for `size` bytes within; small bodies do not wait.

        Yields a function that gives back what is more than so many bytes.
        """
        held = self._counted(size)
        if held:
            await self._take(held)

        def keep(size: int) -> None:
            nonlocal held
            given_back = max(0, held - self._counted(size))
            held -= given_back
            self._free += given_back
            self._wake()

        try:
            yield keep
        finally:
            keep(0)

    def _counted(self, size: int) -> int:
        return 0 if size <= _SMALL else min(size, self._size)

    async def _take(self, size: int) -> None:
        if not self._waiting and size <= self._free:
            self._free -= size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._free += size
            self._wake()
            raise

    def _wake(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.done() and size > self._free:
                return
            self._waiting.popleft()
            if not turn.done():
                self._free -= size
                turn.set_result(None)


class BodyLimit:
    """Reads bodies, refuses large ones however they are sent, and undoes their compression."""

    def __init__(self, app: ASGIApp, limits: LimitsConfig) -> None:
        self._app = app
        self._limit = int(limits.request_mb * _MB)
        self._json_limit = int(min(limits.request_mb, limits.json_mb) * _MB)
        self._timeout_s = limits.body_timeout_s
        self._room = Room(int(limits.buffered_mb * _MB))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        incoming = Incoming(receive, self._timeout_s)
        try:
            encoding = _encoding(scope)
            async with self._room.taken(self._limit if encoding else self._declared(scope)) as keep:
                body = await self._read(incoming)
                if encoding:
                    body = await self._decompressed(body)
                    plain = [pair for pair in scope["headers"] if pair[0] not in _DECODED]
                    scope["headers"] = [*plain, (b"content-length", str(len(body)).encode())]
                keep(len(body))  # the answer may take long
                if scope["path"] not in ARRAYS:
                    self._check_json(body)
                scope["state"]["call"].body = body if len(body) <= _SMALL else b""
                await self._app(scope, _replay(body, receive), send)
        except (BodyTimeout, Refused, TooLarge, UnsupportedMedia) as error:
            await incoming.turn_away(answer_for(error), scope, send)

    def _declared(self, scope: Scope) -> int:
        """The bytes to expect: the limit, if the client did not say."""
        declared = header(scope, b"content-length")
        if not declared:
            return self._limit if header(scope, b"transfer-encoding") else 0
        if int(declared) > self._limit:
            raise self._too_large()
        return int(declared)

    async def _read(self, incoming: Incoming) -> bytes:
        pieces, size = [], 0
        while incoming.more:
            pieces.append(await incoming.piece())
            size += len(pieces[-1])
            if size > self._limit:
                raise self._too_large()
        return b"".join(pieces)

    async def _decompressed(self, body: bytes) -> bytes:
        if len(body) <= _SMALL // 16:
            return self._decompress(body)
        return await asyncio.to_thread(self._decompress, body)

    def _decompress(self, body: bytes) -> bytes:
        """Never holds much more than the limit, whatever the body claims."""
        pieces, size, inside = [], 0, False
        decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        try:
            for start in range(0, len(body), _SLICE):
                given = body[start : start + _SLICE]
                while given:
                    if not inside:
                        frame, inside = decompressor.decompressobj(), True
                    pieces.append(frame.decompress(given))
                    size += len(pieces[-1])
                    if size > self._limit:
                        raise self._too_large()
                    given, inside = (frame.unused_data, False) if frame.eof else (b"", True)
        except zstandard.ZstdError as error:
            raise Refused(f"the body is not valid zstd: {error}") from error
        if inside:
            raise Refused("the body is not valid zstd: it ends too early")
        return b"".join(pieces)

    def _check_json(self, body: bytes) -> None:
        """Such bodies are parsed and validated on the event loop, where everybody would wait for it."""
        if len(body) > self._json_limit or body.count(b"{") > _OBJECTS:
            raise TooLarge(
                f"the body is too large; accepted: JSON of up to {self._json_limit} bytes, {_OBJECTS} objects"
            )

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the body is too large; accepted: up to {self._limit} bytes, decompressed")


_DECODED = (b"content-encoding", b"content-length", b"transfer-encoding")


def _encoding(scope: Scope) -> str:
    encoding = header(scope, b"content-encoding").strip().lower()
    if encoding in ("", "identity"):
        return ""
    if encoding != "zstd":
        raise UnsupportedMedia(f"Content-Encoding: {encoding!r:.60}; accepted: zstd, or none")
    return encoding


def _replay(body: bytes, receive: Receive) -> Receive:
    """What a route receives: the body, then whatever comes (the client leaves)."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
