"""Routes of what is kept: training runs and their checkpoints, and what a checkpoint is of."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from pydantic import BaseModel, ConfigDict
from tinker.types.copy_weights_request import CopyWeightsRequest

from opentinker_core.digests import digest_json
from opentinker_core.service.checkpoints import check_kind, expiry
from opentinker_core.service.dependencies import Serving
from opentinker_core.service.errors import Refused
from opentinker_core.service.principal import Member, Who
from opentinker_core.service.tinker.files import found
from opentinker_core.service.tinker.requests import check_seq, check_text
from opentinker_core.service.tinker.sessions import Limit, Offset
from opentinker_core.service.types import CheckpointKind, Model, NamedCheckpoint

router = APIRouter(prefix="/api/v1", tags=["checkpoints"])

_TYPES = {
    CheckpointKind.WEIGHTS: "training",
    CheckpointKind.SAMPLER_WEIGHTS: "sampler",
    CheckpointKind.EXTERNAL_WEIGHTS: "external",
}
Json = dict[str, Any]


class TtlBody(BaseModel):
    """How long a checkpoint is to be kept from now on."""

    model_config = ConfigDict(extra="forbid")
    ttl_seconds: int | None = None


class PathBody(BaseModel):
    """A `tinker://` path."""

    model_config = ConfigDict(extra="ignore")
    tinker_path: str


@router.get("/training_runs")
async def list_training_runs(
    service: Serving,
    who: Who,
    limit: Limit = 20,
    offset: Offset = 0,
    project_id: Annotated[str | None, Query()] = None,
) -> Json:
    """The newest training runs first."""
    project = check_text("project_id", project_id)
    found, total = await asyncio.to_thread(
        service.records.models, who.tenant, limit, offset, project_id=project
    )
    runs = await asyncio.to_thread(_runs, service, found)
    return {"training_runs": runs, "cursor": {"offset": offset, "limit": limit, "total_count": total}}


@router.get("/training_runs/{training_run_id}")
async def get_training_run(service: Serving, who: Who, training_run_id: str) -> Json:
    """One training run: a model, whether it is in training still or not."""
    model = await asyncio.to_thread(service.records.model, who.tenant, training_run_id)
    return (await asyncio.to_thread(_runs, service, [model]))[0]


@router.get("/training_runs/{training_run_id}/checkpoints")
async def list_checkpoints(service: Serving, who: Who, training_run_id: str) -> Json:
    """The checkpoints of a training run, the newest first."""
    found, _ = await asyncio.to_thread(service.records.checkpoints, who.tenant, training_run_id)
    return {"checkpoints": [_checkpoint(one) for one in found], "cursor": None}


@router.get("/checkpoints")
async def list_all_checkpoints(service: Serving, who: Who, limit: Limit = 100, offset: Offset = 0) -> Json:
    """All checkpoints of the tenant, the newest first."""
    found, total = await asyncio.to_thread(service.records.checkpoints, who.tenant, None, limit, offset)
    cursor = {"offset": offset, "limit": limit, "total_count": total}
    return {"checkpoints": [_checkpoint(one) for one in found], "cursor": cursor}


@router.delete("/training_runs/{training_run_id}/checkpoints/{kind}/{name}", status_code=204)
async def delete_checkpoint(
    service: Serving, who: Member, training_run_id: str, kind: str, name: str
) -> Response:
    """Delete a checkpoint."""
    wanted = check_kind(kind)
    await service.write(lambda: service.checkpoints.delete(who.tenant, training_run_id, wanted, name))
    return Response(status_code=204)


@router.put("/training_runs/{training_run_id}/checkpoints/{kind}/{name}/ttl", status_code=204)
async def set_ttl(
    service: Serving, who: Member, training_run_id: str, kind: str, name: str, body: TtlBody
) -> Response:
    """Let a checkpoint expire, or be kept for good."""
    wanted, expires_at = check_kind(kind), expiry(body.ttl_seconds)
    await service.write(
        lambda: service.records.set_expiry(who.tenant, training_run_id, wanted, name, expires_at)
    )
    return Response(status_code=204)


@router.post("/training_runs/{training_run_id}/checkpoints/{kind}/{name}/publish")
async def publish_checkpoint(
    service: Serving, who: Member, training_run_id: str, kind: str, name: str
) -> Response:
    """Refused: nothing of a tenant is ever shown to another one."""
    await found(service, who, training_run_id, kind, name)
    raise Refused("publish: checkpoints cannot be made public on this server")


@router.delete("/training_runs/{training_run_id}/checkpoints/{kind}/{name}/publish", status_code=204)
async def unpublish_checkpoint(
    service: Serving, who: Member, training_run_id: str, kind: str, name: str
) -> Response:
    """No checkpoint is public, so nothing changes."""
    await found(service, who, training_run_id, kind, name)
    return Response(status_code=204)


@router.post("/weights_info")
async def weights_info(service: Serving, who: Who, body: PathBody) -> Json:
    """What a checkpoint is of."""
    checkpoint = await asyncio.to_thread(service.checkpoints.resolve, who.tenant, body.tinker_path)
    model = await asyncio.to_thread(service.records.model, who.tenant, checkpoint.model_id)
    return {
        "base_model": model.base_model,
        "optimizer_config": {"type": "adamw"},
        "is_lora": True,
        "lora_rank": model.lora.get("rank"),
        **{key: model.lora.get(key) for key in ("train_unembed", "train_mlp", "train_attn")},
    }


@router.post("/copy_weights")
async def copy_weights(
    service: Serving,
    who: Member,
    body: CopyWeightsRequest,
    key: Annotated[str, Header(alias="X-Idempotency-Key", max_length=200)] = "",
) -> Json:
    """Give a checkpoint a second name, in a training run of its own; the files are shared."""
    if body.weights_access_token is not None:
        raise Refused("weights_access_token: given; accepted: none, weights of other tenants are not copied")
    project, session_id, expires_at = body.destination_project_id, body.session_id, expiry(body.ttl_seconds)
    if (session_id is None) == (project is None) or (session_id is None) != (body.model_seq_id is None):
        raise Refused("accepted: destination_project_id, or session_id and model_seq_id")
    if session_id is None:  # a retry of the same call has the same key
        session_id = digest_json([who.tenant, key or secrets.token_hex(16)])[:16]
    else:
        await service.sessions.check_live(who.tenant, session_id)
    copy = partial(
        service.checkpoints.copy,
        who.tenant,
        body.source_path,
        session_id=session_id,
        seq=check_seq("model_seq_id", body.model_seq_id or 0),
        project_id=check_text("destination_project_id", project),
        expires_at=expires_at,
    )
    return {"tinker_path": (await service.write(copy)).path}


def _runs(service: Serving, models: Sequence[Model]) -> list[Json]:
    """Training runs of a tenant as the SDK reads them."""
    if not models:
        return []
    newest = service.records.newest_checkpoints(models[0].tenant, [model.model_id for model in models])
    return [_run(model, newest) for model in models]


def _run(model: Model, newest: Mapping[tuple[str, CheckpointKind], NamedCheckpoint]) -> Json:
    last = {
        kind: _checkpoint(newest[model.model_id, kind]) if (model.model_id, kind) in newest else None
        for kind in CheckpointKind
    }
    return {
        "training_run_id": model.model_id,
        "base_model": model.base_model,
        "model_owner": model.tenant,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": model.lora.get("rank"),
        "last_request_time": model.used_at.isoformat(),
        "last_checkpoint": last[CheckpointKind.WEIGHTS],
        "last_sampler_checkpoint": last[CheckpointKind.SAMPLER_WEIGHTS],
        "user_metadata": {name: _text(value) for name, value in model.user_metadata.items()},
        "policy": model.policy_name,
    }


def _checkpoint(checkpoint: NamedCheckpoint) -> Json:
    """A checkpoint as the SDK reads it."""
    expires_at, created_at = checkpoint.expires_at, checkpoint.created_at
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": created_at.isoformat() if created_at else None,
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": False,
        "user_metadata": {name: _text(value) for name, value in checkpoint.user_metadata.items()},
        "expires_at": expires_at.isoformat() if expires_at else None,
        "version": checkpoint.version.ref,
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)
