"""A request as it comes in: its headers, its body piece by piece, and how it is turned away."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from opentinker_core.service.errors import Answer, ServiceError

Result = TypeVar("Result")

_DISCARDED_S = 5.0
_DISCARDED = 64 << 20
"""How much of a body is still read after it is clear that it is not wanted, and for how long. A client that
gets its answer while it sends may find the connection broken instead, and would try again."""


class BodyTimeout(ServiceError):  # noqa: N818 - what it says of the call
    """The client stopped sending; it may try again."""

    status = 408
    category = "user"


class Incoming:
    """A body as it comes in."""

    def __init__(self, receive: Receive, timeout_s: float = _DISCARDED_S) -> None:
        self._receive, self._timeout_s = receive, timeout_s
        self.more = True
        """Whether something of the body may still come."""

    async def piece(self) -> bytes:
        """The next piece, which may be empty.

        Raises:
            BodyTimeout: none came in time.
            ClientDisconnect: the client left.
        """
        try:
            message = await asyncio.wait_for(self._receive(), self._timeout_s)
        except TimeoutError as error:
            raise BodyTimeout(f"no piece of the body came for {self._timeout_s:g} s") from error
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        self.more = message.get("more_body", False)
        return bytes(message.get("body", b""))

    async def discard(self) -> None:
        """Read what still comes, for a while."""
        limit = _DISCARDED
        with contextlib.suppress(TimeoutError, BodyTimeout):
            async with asyncio.timeout(_DISCARDED_S):
                while self.more and limit > 0:
                    limit -= len(await self.piece())

    async def turn_away(self, answer: Answer, scope: Scope, send: Send) -> None:
        """Send an error as the answer; a connection on which more comes than is read is closed."""
        if answer.status != BodyTimeout.status:
            await self.discard()
        await refuse(answer, scope, send, close=self.more)


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Await `work`, which is cancelled if the client leaves; the request's body was read before.

    Raises:
        ClientDisconnect: the client left; nobody reads what would be answered.
    """

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(leave())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def refuse(answer: Answer, scope: Scope, send: Send, *, close: bool = False) -> None:
    """Send an error as the answer of a request."""
    body = json.dumps(answer.body(scope["state"]["request_id"])).encode("ascii")
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **answer.headers}
    if answer.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if close:
        headers["Connection"] = "close"
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def header(scope: Scope, name: bytes) -> str:
    """The value of a request's header; empty if there is none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
