"""Routes of clients and their sessions: configuration, capabilities, heartbeats, telemetry."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field
from tinker.types.create_session_request import CreateSessionRequest
from tinker.types.session_heartbeat_request import SessionHeartbeatRequest

from opentinker_core.errors import NotFoundError, UsageError
from opentinker_core.policies.types import RunStatus
from opentinker_core.service.dependencies import Serving
from opentinker_core.service.errors import Gone
from opentinker_core.service.principal import Member, Who
from opentinker_core.service.tinker.requests import check_may_change, check_metadata, check_text
from opentinker_core.service.types import ServiceSession, SessionStatus

router = APIRouter(prefix="/api/v1", tags=["sessions"])

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**31)]

_TAGS = 64
_LONGEST = 256
"""Characters of a tag or a name."""
_LARGEST_METADATA = 16_384

_CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}
"""What the SDK is to use of what it can do; anything else is at the SDK's defaults."""


class ClientConfigBody(BaseModel):
    """What the SDK says of itself."""

    model_config = ConfigDict(extra="allow")
    sdk_version: str = ""


class FinishReason(BaseModel):
    """Why a session ends."""

    model_config = ConfigDict(extra="allow")
    type: Literal["success", "errored", "interrupted"]


class FinishBody(BaseModel):
    """The end of a session."""

    model_config = ConfigDict(extra="ignore")
    reason: FinishReason
    detail: Any = None


class TelemetryBody(BaseModel):
    """Events of a client, which nothing is done with."""

    model_config = ConfigDict(extra="ignore")
    events: list[Any]
    session_id: str


class ProjectBody(BaseModel):
    """The project that a session is to be of."""

    model_config = ConfigDict(extra="forbid")
    project_id: Annotated[str, Field(min_length=1)]


@router.post("/client/config")
async def client_config(who: Who, body: ClientConfigBody) -> dict[str, Any]:
    """Flags for the SDK."""
    return _CLIENT_CONFIG


@router.post("/client/dynamic_config")
async def dynamic_config(who: Who, body: ClientConfigBody) -> dict[str, Any]:
    """Flags for the SDK, asked for again and again."""
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


@router.get("/get_server_capabilities")
async def capabilities(service: Serving, who: Who) -> dict[str, Any]:
    """The base models that are served."""
    return {
        "supported_models": [
            {
                "model_name": model.name,
                "max_context_length": model.context,
                "trainable": True,
                "sampleable": True,
            }
            for model in service.models()
        ]
    }


@router.post("/telemetry")
async def telemetry(who: Who, body: TelemetryBody) -> dict[str, str]:
    """Accept what the SDK tells of itself; nothing of it is kept."""
    return {"status": "accepted"}


@router.post("/create_session")
async def create_session(service: Serving, who: Who, body: CreateSessionRequest) -> dict[str, Any]:
    """Begin a session."""
    if len(body.tags) > _TAGS:
        raise UsageError(f"tags: {len(body.tags)}; accepted: up to {_TAGS}")
    tags = [check_text("tags", tag, _LONGEST) or "" for tag in body.tags]
    session = await service.sessions.begin(
        who.tenant,
        tags=tags,
        user_metadata=check_metadata("user_metadata", body.user_metadata, _LARGEST_METADATA),
        sdk_version=check_text("sdk_version", body.sdk_version, _LONGEST) or "",
        project_id=check_text("project_id", body.project_id, _LONGEST),
        display_name=check_text("display_name", body.display_name, _LONGEST),
    )
    return {"type": "create_session", "session_id": session.session_id}


@router.post("/session_heartbeat")
async def session_heartbeat(service: Serving, who: Who, body: SessionHeartbeatRequest) -> dict[str, str]:
    """Keep a session alive; 410 tells the SDK to stop."""
    try:
        await service.sessions.check_live(who.tenant, body.session_id)
    except NotFoundError as error:
        raise Gone(str(error)) from error
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish_session(service: Serving, who: Who, session_id: str, body: FinishBody) -> Response:
    """End a session and release what it holds; one that trains is not for readers to end."""
    await check_may_change(service, who, session_id)
    done = RunStatus.COMPLETED if body.reason.type == "success" else RunStatus.FAILED
    await service.sessions.end(who.tenant, session_id, SessionStatus.FINISHED, done, body.reason.type)
    return Response(status_code=204)


@router.get("/sessions")
async def list_sessions(
    service: Serving, who: Who, limit: Limit = 20, offset: Offset = 0
) -> dict[str, list[str]]:
    """The newest sessions first."""
    found, _ = await asyncio.to_thread(service.records.sessions, who.tenant, limit, offset)
    return {"sessions": [session.session_id for session in found]}


@router.get("/sessions/{session_id}")
async def get_session(service: Serving, who: Who, session_id: str) -> dict[str, Any]:
    """A session with what was made in it."""
    session = await asyncio.to_thread(service.records.session, who.tenant, session_id)
    models, _ = await asyncio.to_thread(service.records.models, who.tenant, None, 0, session_id)
    samplers = await asyncio.to_thread(service.records.samplers, who.tenant, session_id)
    return {
        "training_run_ids": [model.model_id for model in reversed(models)],
        "sampler_ids": [sampler.sampler_id for sampler in samplers],
        "user_metadata": texts(session),
        "display_name": session.display_name,
    }


@router.put("/sessions/{session_id}/project", status_code=204)
async def assign_project(service: Serving, who: Member, session_id: str, body: ProjectBody) -> Response:
    """Let a session be of a project, which is a label here and no more."""
    project = check_text("project_id", body.project_id, _LONGEST) or ""
    await service.write(lambda: service.records.set_project(who.tenant, session_id, project))
    return Response(status_code=204)


def texts(session: ServiceSession) -> dict[str, str]:
    """A session's metadata as the SDK reads it: texts."""
    return {
        name: value if isinstance(value, str) else str(value) for name, value in session.user_metadata.items()
    }
