"""Calls of the SDK that this server does not serve: each says so at once, and what to use instead."""

import asyncio

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict

from opentinker_core.service.dependencies import Serving
from opentinker_core.service.errors import Refused
from opentinker_core.service.principal import Member, Who

router = APIRouter(prefix="/api/v1", tags=["not served"])


class AnyBody(BaseModel):
    """Whatever the SDK sends."""

    model_config = ConfigDict(extra="allow")


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(service: Serving, who: Who, session_id: str) -> Response:
    """Refused."""
    await asyncio.to_thread(service.records.session, who.tenant, session_id)
    raise Refused("trace_export: not served; the lineage of every version is in the catalog")


@router.post("/create_custom_loss")
async def create_custom_loss(who: Member, body: AnyBody) -> Response:
    """Refused; the SDK computes custom losses itself."""
    raise Refused("create_custom_loss: not served; accepted: forward_backward_custom, computed by the client")


@router.post("/auth/token")
async def auth_token(who: Who, body: AnyBody) -> Response:
    """Refused; keys are sent as they are."""
    raise Refused("auth/token: not served; accepted: an API key as X-API-Key")
