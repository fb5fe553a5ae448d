"""`/v1/models`: what can be sampled."""

from fastapi import APIRouter

from opentinker_core.service.dependencies import Serving
from opentinker_core.service.openai.targets import find_target, list_targets
from opentinker_core.service.principal import Who

router = APIRouter(prefix="/v1", tags=["openai"])


@router.get("/models")
async def models(service: Serving, who: Who) -> dict[str, object]:
    """Base models, and the tenant's policies by name and alias; any `policy@number` can be asked for too."""
    return {"object": "list", "data": await list_targets(service, who.tenant)}


@router.get("/models/{model:path}")
async def model(service: Serving, who: Who, model: str) -> dict[str, object]:
    """One of them, under the name that stands for it for good."""
    return (await find_target(service, who.tenant, model)).card()
