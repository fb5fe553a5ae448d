"""Routes of results: each call that takes long promises one, and the client asks for it until it is there."""

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse
from tinker.types.future_retrieve_request import FutureRetrieveRequest

from opentinker_core.errors import NotFoundError
from opentinker_core.service.dependencies import Serving
from opentinker_core.service.errors import Gone
from opentinker_core.service.futures import Failure
from opentinker_core.service.incoming import while_connected
from opentinker_core.service.principal import Who

router = APIRouter(prefix="/api/v1", tags=["futures"])

POLL_SECONDS = 25.0
"""How long an answer waits for a result; the SDK gives up a call after 45 s."""


class CancelBody(BaseModel):
    """A result that nobody waits for."""

    model_config = ConfigDict(extra="ignore")
    request_id: str


@router.post("/retrieve_future")
async def retrieve_future(
    service: Serving, who: Who, request: Request, body: FutureRetrieveRequest
) -> Response:
    """The result of a call, as soon as there is one; `try_again` if there is none yet."""
    try:
        waiting = service.futures.retrieve(who.tenant, body.request_id, POLL_SECONDS)
        outcome = await while_connected(request.receive, waiting)
    except KeyError:
        return await _absent(service, who, body.request_id)
    if outcome is None:
        return JSONResponse({"type": "try_again", "request_id": body.request_id, "queue_state": "active"})
    if isinstance(outcome, Failure):
        return JSONResponse({"error": outcome.message, "category": outcome.category})
    return Response(outcome.body, media_type=outcome.media_type)


@router.post("/cancel_future")
async def cancel_future(service: Serving, who: Who, body: CancelBody) -> dict[str, str]:
    """Say that nobody waits for a sample any more; nothing happens to anything else."""
    if ":sample:" in body.request_id:
        await service.futures.cancel(who.tenant, body.request_id)
    return {"status": "ok"}


async def _absent(service: Serving, who: Who, request_id: str) -> Response:
    """Of training, why there is no result; a sample can be asked for again."""
    owner, _, _ = request_id.rpartition(":")
    if ":train:" in owner:
        reason = await service.training.absence(who.tenant, request_id)
        return JSONResponse({"error": str(reason), "category": "user"})
    if ":sample:" in owner:
        await service.read(lambda: service.records.sampler(who.tenant, owner))
        raise Gone(f"request_id: the result of {request_id} is not there any more; ask for it again")
    raise NotFoundError(f"request_id: there is no {request_id!r:.100}")
