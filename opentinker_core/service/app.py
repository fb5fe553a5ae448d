"""The application: what every request passes, the routes, and how errors are answered."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response

from opentinker_core import __version__
from opentinker_core.errors import OpenTinkerError
from opentinker_core.service import administration, health
from opentinker_core.service.audit import AuditLog
from opentinker_core.service.bodies import BodyLimit
from opentinker_core.service.doors import Gate, KeyCheck, Reception, StopCheck
from opentinker_core.service.errors import Answer, Category, answer_for
from opentinker_core.service.keys import KeyRing, Keys
from opentinker_core.service.openai import chat, completions, models
from opentinker_core.service.routes import METRICS, PUBLIC
from opentinker_core.service.signatures import Signer
from opentinker_core.service.tinker import (
    checkpoints,
    files,
    futures,
    sampling,
    search,
    sessions,
    training,
    unsupported,
    usage,
)
from opentinker_core.service.tracing import tracer_provider

if TYPE_CHECKING:
    from opentinker_core.service.core import Service

ROUTERS: tuple[APIRouter, ...] = (
    health.router,
    administration.router,
    usage.router,
    sessions.router,
    training.router,
    futures.router,
    checkpoints.router,
    files.router,
    search.router,
    unsupported.router,
    sampling.router,
    models.router,
    completions.router,
    chat.router,
)
"""Everything that is served."""


def make_app(service: "Service") -> FastAPI:
    """The application that serves `service`; it starts and stops it with its own lifespan.

    Raises:
        UsageError: traces are to be sent in a way that is not there (see `tracing.tracer_provider`).
        OpenTinkerError: the catalog database cannot be opened.
    """
    config = service.config
    tracer = tracer_provider()
    url = service.settings.resolved_catalog_url
    keys, audit, gate, signer = Keys(url), AuditLog(url, config.audit_days), Gate(), Signer()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await audit.start()
        try:
            await service.start()
            try:
                yield
            finally:
                await service.stop()
        finally:
            await audit.stop()
            keys.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.shutdown)  # which sends what is left

    public = PUBLIC | ({METRICS} if config.metrics == "open" else frozenset())
    app = FastAPI(
        title="OpenTinker",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={
            "tracing": tracer is not None,
            "tracer_provider": tracer,
            "operation_spans": False,  # of no use where the work is done by an engine
            "metrics": False,  # they are Prometheus'
            "logs": False,
            "auto_configure": False,
        },
        middleware=[
            Middleware(Reception, service.metrics, audit),
            Middleware(KeyCheck, KeyRing(keys).principal, public, signer.principal),
            Middleware(StopCheck, gate),
            Middleware(BodyLimit, config.limits),
        ],
    )
    app.state.service, app.state.config, app.state.metrics = service, config, service.metrics
    app.state.keys, app.state.audit, app.state.gate, app.state.signer = keys, audit, gate, signer
    for router in ROUTERS:
        app.router.routes.extend(router.routes)  # flat, so that all of them can be enumerated
    app.add_exception_handler(OpenTinkerError, _answer)
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(RequestValidationError, _answer)
    return app


def routes(app: FastAPI) -> list[APIRoute]:
    """Every route that a router brought, for tests that look at all of them."""
    return [route for route in app.routes if isinstance(route, APIRoute)]


def dependencies_of(route: APIRoute) -> set[Callable[..., Any]]:
    """All functions that a route depends on."""
    found, pending = set(), list(route.dependant.dependencies)
    while pending:
        dependant = pending.pop()
        if dependant.call is not None:
            found.add(dependant.call)
        pending.extend(dependant.dependencies)
    return found


async def _answer(request: Request, error: Exception) -> Response:
    answer = _answer_for(error)
    # ASCII: what a client sent may have no UTF-8 form.
    content = json.dumps(answer.body(request.state.request_id)).encode("ascii")
    return Response(content, answer.status, dict(answer.headers), "application/json")


def _answer_for(error: Exception) -> Answer:
    match error:
        case RequestValidationError():
            return Answer(422, _invalid(error.errors()), "user")
        case HTTPException():
            headers = dict(error.headers or {})
            category: Category = "user" if error.status_code < 500 else "server"
            return Answer(error.status_code, str(error.detail), category, headers)
    return answer_for(error)


def _invalid(errors: Sequence[Any]) -> str:
    """One line: each field and what is wrong with it."""
    parts = []
    for detail in errors[:10]:
        field = ".".join(str(part) for part in detail["loc"][1:]) or "body"
        given = detail.get("input")
        shown = f"{given!r:.60}: " if isinstance(given, str | int | float | bool) else ""
        parts.append(f"{field:.200}: {shown}{str(detail['msg'])[:200]}")
    return "; ".join(parts)
