"""The HTTP interface of an environment server (docs/environment_server.md)."""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from envs.arguments import unknown
from envs.serving import bodies
from envs.serving.config import ServerConfig
from envs.serving.errors import Code, Refusal
from envs.serving.keys import Keys, Owner
from envs.serving.metrics import CONTENT_TYPE, Metrics
from envs.serving.sessions import Sessions

_LOG = logging.getLogger(__name__)

_BODY_S = 30.0
"""How long a client may take to send a body."""
_DISCARDED = 64 << 20
"""How much of a body is still read when it is too large already."""
_SESSION = re.compile(r"[0-9a-f]{32}\Z")

Model = TypeVar("Model", bound=BaseModel)
Endpoint = Callable[[Request], Awaitable[Response]]


class Interface:
    """The routes; none of them runs an environment's code in this process."""

    def __init__(self, config: ServerConfig, sessions: Sessions, metrics: Metrics) -> None:
        self._config, self._sessions, self._metrics = config, sessions, metrics
        self._keys = Keys(config.keys)
        self.stopping = False

    def app(self) -> Starlette:
        """The ASGI application."""
        routes: list[tuple[str, str, Endpoint]] = [
            ("GET", "/healthz", self._healthz),
            ("GET", "/metrics", self._metrics_text),
            ("POST", "/v1/describe", self._describe),
            ("POST", "/v1/recompute", self._recompute),
            ("POST", "/v1/leases", self._renew),
            ("PUT", "/v1/sessions/{session}", self._open),
            ("DELETE", "/v1/sessions/{session}", self._close),
            ("POST", "/v1/sessions/{session}/calls", self._call),
        ]
        return Starlette(
            routes=[Route(path, self._answering(run), methods=[method]) for method, path, run in routes],
            exception_handlers={HTTPException: self._no_such_route},
        )

    async def _healthz(self, _: Request) -> Response:
        shards = self._sessions.shards.alive
        if self.stopping or not shards:
            raise Refusal(
                Code.UNAVAILABLE, "the server is stopping" if self.stopping else "no shard is alive"
            )
        return _json({"status": "ok", "shards": shards})

    async def _metrics_text(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def _describe(self, request: Request) -> Response:
        self._owner(request)
        body, _ = await self._body(request, bodies.Making)
        return _raw(await self._sessions.once({"do": "describe"} | self._making(body)))

    async def _recompute(self, request: Request) -> Response:
        self._owner(request)
        body, _ = await self._body(request, bodies.Recomputing)
        return _raw(await self._sessions.once({"do": "recompute"} | self._making(body)))

    async def _renew(self, request: Request) -> Response:
        owner = self._owner(request)
        body, _ = await self._body(request, bodies.Renewing)
        for name in body.close:
            self._sessions.close((owner, name))
        lost = {name: self._sessions.renew((owner, name)) for name in body.renew}
        return _json({"lost": {name: str(reason) for name, reason in lost.items() if reason is not None}})

    async def _open(self, request: Request) -> Response:
        id = self._owner(request), _session(request)
        body, content = await self._body(request, bodies.Opening)
        making = self._making(body)
        if self.stopping:
            raise Refusal(Code.UNAVAILABLE, "the server is stopping")
        shown = await self._sessions.open(id, making, content)
        return _raw(b'{"lease_s":%s,"shown":%s}' % (json.dumps(self._config.lease_s).encode(), shown))

    async def _call(self, request: Request) -> Response:
        id = self._owner(request), _session(request)
        body, content = await self._body(request, bodies.Calling)
        call = body.call.model_dump()
        return _raw(await self._sessions.call(id, call.pop("number"), content, call))

    async def _close(self, request: Request) -> Response:
        self._sessions.close((self._owner(request), _session(request)))
        return Response(status_code=204)

    def _owner(self, request: Request) -> Owner:
        """Who calls; before anything of the body is read."""
        owner = self._keys.owner(request.headers.get("authorization", ""))
        if owner is None:
            raise Refusal(
                Code.UNAUTHORIZED,
                "the key is missing or unknown; accepted: a header 'Authorization: Bearer KEY'",
            )
        return owner

    def _making(self, body: bodies.Making) -> dict[str, Any]:
        if body.id not in self._config.environments:
            raise Refusal(
                Code.UNKNOWN_ENVIRONMENT, str(unknown("environment", body.id, self._config.environments))
            )
        return body.model_dump()

    async def _body(self, request: Request, model: type[Model]) -> tuple[Model, bytes]:
        """The body, checked, and as it came."""
        content, most = bytearray(), self._config.max_body_bytes
        try:
            async with asyncio.timeout(_BODY_S):
                size = 0
                async for piece in request.stream():
                    size += len(piece)
                    if size > most + _DISCARDED:
                        break
                    if size <= most:  # what is more is read all the same: who still sends hears no answer
                        content += piece
        except TimeoutError as error:
            raise Refusal(Code.TOO_SLOW, f"the body did not come within {_BODY_S:g} s") from error
        if size > most:
            raise Refusal(Code.TOO_LARGE, f"the body is too large; accepted: {most} bytes")
        try:
            return model.model_validate_json(bytes(content)), bytes(content)
        except ValidationError as error:
            raise Refusal(Code.BAD_REQUEST, _described(error)) from error

    def _answering(self, endpoint: Endpoint) -> Endpoint:
        """An endpoint that answers whatever goes wrong."""

        async def answer(request: Request) -> Response:
            try:
                return await endpoint(request)
            except Refusal as refusal:
                return self._refused(refusal)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it
            except Exception:  # noqa: BLE001 - a defect must not take the connection with it
                _LOG.exception("%s %s failed by a defect", request.method, request.scope["route"].path)
                return self._refused(Refusal(Code.INTERNAL, "the server failed; its log says how"))

        return answer

    async def _no_such_route(self, _: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        refused = self._refused(Refusal(Code.BAD_REQUEST, "there is no such path, or not with this method"))
        refused.status_code = status
        return refused

    def _refused(self, refusal: Refusal) -> Response:
        self._metrics.refused(refusal.code)
        response = _json(refusal.body(), refusal.status)
        if refusal.code is Code.UNAUTHORIZED:
            response.headers["WWW-Authenticate"] = "Bearer"
        if refusal.code in (Code.TOO_LARGE, Code.TOO_SLOW, Code.UNAUTHORIZED):
            response.headers["Connection"] = "close"  # the rest of the body is not read
        return response


def _session(request: Request) -> str:
    name = str(request.path_params["session"])
    if not _SESSION.match(name):
        raise Refusal(Code.BAD_REQUEST, "the session's name is not accepted; accepted: 32 hexadecimal digits")
    return name


def _described(error: ValidationError) -> str:
    """The first things that are wrong with a body, without what was sent."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(
        f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in found[:3]
    )  # fmt: skip


def _json(value: Any, status: int = 200) -> Response:
    return _raw(json.dumps(value).encode(), status)


def _raw(content: bytes, status: int = 200) -> Response:
    return Response(content, status, media_type="application/json")
