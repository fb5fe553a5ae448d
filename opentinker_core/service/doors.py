"""What every request passes before its route: an id and a log line, a key, and whether there is new work.

ASGI middlewares, the outermost first: `Reception`, `KeyCheck`, `StopCheck`, then `bodies.BodyLimit`.
"""

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable

from opentelemetry import trace
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opentinker_core.service import logs
from opentinker_core.service.audit import AuditLog, Call
from opentinker_core.service.errors import Unauthenticated, Unavailable, answer_for
from opentinker_core.service.incoming import Incoming, header, refuse
from opentinker_core.service.metrics import Metrics
from opentinker_core.service.outgoing import send_in_pieces
from opentinker_core.service.principal import Principal
from opentinker_core.service.routes import ANSWERED_WHILE_STOPPING, PUBLIC

_LOG = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_CLIENT_LEFT = 499
"""What logs and metrics call a request whose client did not wait for the answer."""

Authenticate = Callable[[str], Awaitable[Principal | None]]


class Reception:
    """Gives each request an id, turns what goes wrong into an answer, and notes what became of it."""

    def __init__(self, app: ASGIApp, metrics: Metrics, audit: AuditLog) -> None:
        self._app, self._metrics, self._audit = app, metrics, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no web sockets here
            await send({"type": "websocket.close", "code": 1000})
            return
        given = header(scope, b"x-request-id")
        request_id = given if _REQUEST_ID.match(given) else uuid.uuid4().hex
        logs.request_id.set(request_id)
        trace.get_current_span().set_attribute("opentinker.request_id", request_id)
        scope.setdefault("state", {})["request_id"] = request_id
        call = scope["state"]["call"] = Call(scope["method"], scope["path"])
        began = time.monotonic()
        status = _CLIENT_LEFT

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send_in_pieces(message, send)

        self._metrics.began()
        try:
            await self._app(scope, receive, answer)
        except ClientDisconnect:
            pass
        except Exception as error:  # noqa: BLE001 - a defect must not take the connection with it
            _LOG.exception("%s %s failed by a defect", scope["method"], scope["path"])
            if status == _CLIENT_LEFT:
                await refuse(answer_for(error), scope, answer)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self._note(scope, route, status, time.monotonic() - began, call)

    def _note(self, scope: Scope, route: str, status: int, seconds: float, call: Call) -> None:
        self._metrics.ended(scope["method"], route, status, seconds)
        who: Principal | None = scope["state"].get("principal")
        fields = {
            "method": scope["method"],
            "path": scope["path"],
            "route": route,
            "status": status,
            "seconds": round(seconds, 4),
            "tenant": who.tenant if who else None,
            "key_id": who.key_id if who else None,
        }
        quiet = route in PUBLIC and status < 400
        _LOG.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})
        if numbered := scope["state"].get("numbered"):  # by routes whose body is no JSON
            call.subject |= {"model_id": str(numbered[0])[:200], "seq_id": int(numbered[1])}
        if who is not None:
            self._audit.add(who, scope["state"]["request_id"], route, status, call, scope.get("path_params"))


class KeyCheck:
    """Lets nobody in without a key or a signed URL; only the paths of `public` are open."""

    def __init__(
        self,
        app: ASGIApp,
        authenticate: Authenticate,
        public: frozenset[str] = PUBLIC,
        signed: Callable[[Scope], Principal | None] = lambda _: None,
    ) -> None:
        """`signed` gives who calls by a signed URL, if that is what is asked for."""
        self._app, self._authenticate, self._public, self._signed = app, authenticate, public, signed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in self._public:
            await self._app(scope, receive, send)
            return
        try:
            scope["state"]["principal"] = await self._principal(scope)
        except Exception as error:  # noqa: BLE001 - told apart by `answer_for`
            if not isinstance(error, Unauthenticated):
                _LOG.exception("a key could not be checked")
            await Incoming(receive).turn_away(answer_for(error), scope, send)
            return
        await self._app(scope, receive, send)

    async def _principal(self, scope: Scope) -> Principal:
        key = presented_key(scope)
        if not key and (signed := self._signed(scope)) is not None:
            return signed
        if not key:
            raise Unauthenticated(
                "this call needs an API key; accepted: a header 'X-API-Key: tml-...' or "
                "'Authorization: Bearer tml-...' (make a key with: opentinker keys create)"
            )
        found = await self._authenticate(key)
        if found is None:
            raise Unauthenticated("the API key is not valid: unknown, expired or revoked")
        return found


class Gate:
    """Whether the server takes new work, and how many requests do some; closed when it is told to stop.

    A request whose answer waits for its client to read does none.
    """

    def __init__(self) -> None:
        self.open = True
        self.busy = 0


class StopCheck:
    """Refuses what would begin something while the server stops; clients may still fetch results."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app, self._gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _begins_nothing(scope):
            await self._app(scope, receive, send)
            return
        if not self._gate.open:
            refusal = answer_for(Unavailable("the server is stopping; ask again in a moment"))
            await Incoming(receive).turn_away(refusal, scope, send)
            return

        async def answer(message: Message) -> None:
            self._gate.busy -= 1
            try:
                await send(message)
            finally:
                self._gate.busy += 1

        self._gate.busy += 1
        try:
            await self._app(scope, receive, answer)
        finally:
            self._gate.busy -= 1


def _begins_nothing(scope: Scope) -> bool:
    return scope["method"] in ("GET", "HEAD") or scope["path"] in ANSWERED_WHILE_STOPPING


def presented_key(scope: Scope) -> str:
    """The key that a request shows, as the Tinker SDK does or as OpenAI's client does."""
    if key := header(scope, b"x-api-key"):
        return key.strip()
    scheme, _, value = header(scope, b"authorization").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else ""
