"""Whether the server is there and takes work, its metrics; the only routes without a caller."""

from fastapi import APIRouter, Request, Response

from opentinker_core.service.errors import NotFound, Unavailable
from opentinker_core.service.metrics import CONTENT_TYPE
from opentinker_core.service.principal import Role, principal
from opentinker_core.service.routes import METRICS

router = APIRouter(tags=["operation"])


@router.get("/livez")
async def livez() -> dict[str, str]:
    """The process runs and answers."""
    return {"status": "ok"}


@router.get("/readyz")
@router.get("/healthz")
async def readyz(request: Request) -> dict[str, str]:
    """The server takes work; 503 while it stops."""
    if not request.app.state.gate.open:
        raise Unavailable("the server is stopping")
    return {"status": "ok"}


@router.get("/api/v1/healthz")
async def tinker_healthz() -> dict[str, str]:
    """As the Tinker API has it."""
    return {"status": "ok"}


@router.get(METRICS)
async def metrics(request: Request) -> Response:
    """Prometheus metrics: open, for the role `admin`, or off, as the config says."""
    access = request.app.state.config.metrics
    if access == "off":
        raise NotFound("there are no metrics here")
    if access == "keyed" and not (await principal(request)).may(Role.ADMIN):
        raise NotFound("there are no metrics for this key's role")
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE)
