"""Routes of a checkpoint's files: one by one, by a key or by a signed URL; and all in a tar archive."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse, StreamingResponse

from opentinker_core.policies.tables import utc_now
from opentinker_core.service.checkpoints import check_kind, parse_path
from opentinker_core.service.dependencies import Serving
from opentinker_core.service.errors import NotFound, Refused
from opentinker_core.service.principal import Who
from opentinker_core.service.signatures import Signer
from opentinker_core.service.tinker.archives import tar_of
from opentinker_core.service.types import CheckpointKind, NamedCheckpoint
from opentinker_core.snapshots.protocol import Snapshot

router = APIRouter(prefix="/api/v1", tags=["checkpoints"])

URL_HOURS = 1
"""How long signed URLs are valid."""


@router.get("/training_runs/{training_run_id}/checkpoints/{kind}/{name}/archive")
async def archive(service: Serving, who: Who, training_run_id: str, kind: str, name: str) -> Response:
    """The files of a checkpoint in a tar archive: a PEFT directory, of weights with the optimizer's state."""
    checkpoint = await found(service, who, training_run_id, kind, name)
    size, pieces = await asyncio.to_thread(tar_of, await _directory(service, files_of(checkpoint)))
    headers = {
        "Content-Length": str(size),
        "Content-Disposition": f'attachment; filename="{checkpoint.name}.tar"',
    }
    stream: Iterator[bytes] = pieces
    return StreamingResponse(stream, media_type="application/x-tar", headers=headers)


@router.get("/training_runs/{training_run_id}/checkpoints/{kind}/{name}/external_weights_urls")
async def external_weights_urls(
    service: Serving, who: Who, request: Request, training_run_id: str, kind: str, name: str
) -> dict[str, Any]:
    """A URL for each file of a checkpoint that needs no key, for an hour or until the server stops."""
    checkpoint = await found(service, who, training_run_id, kind, name)
    uri, store = files_of(checkpoint).uri, service.workspace.snapshots
    manifest = await asyncio.to_thread(store.manifest, uri)
    signer: Signer = request.app.state.signer
    expires = utc_now().replace(microsecond=0) + timedelta(hours=URL_HOURS)
    base = str(request.base_url).rstrip("/")
    folder = f"/api/v1/training_runs/{checkpoint.model_id}/checkpoints/{checkpoint.checkpoint_id}/files"
    urls = {
        file.name: base + signer.sign(who.tenant, f"{folder}/{file.name}", expires) for file in manifest.files
    }
    return {"urls": urls, "expires": expires.isoformat()}


@router.get("/training_runs/{training_run_id}/checkpoints/{kind}/{name}/files/{file}")
async def get_file(
    service: Serving, who: Who, training_run_id: str, kind: str, name: str, file: str
) -> Response:
    """One file of a checkpoint."""
    checkpoint = await found(service, who, training_run_id, kind, name)
    directory = await _directory(service, files_of(checkpoint))
    there = {path.name: path for path in directory.iterdir() if path.is_file()}
    if file not in there:
        raise NotFound(f"file: {checkpoint.path} has no {file!r:.80}; accepted: {', '.join(sorted(there))}")
    return FileResponse(there[file], media_type="application/octet-stream", filename=file)


async def found(service: Serving, who: Who, run: str, kind: str, name: str) -> NamedCheckpoint:
    """The tenant's checkpoint at the parts of a path.

    Raises:
        UsageError: they are none of a path.
        NotFoundError: the tenant has no such checkpoint, or it has expired.
    """
    path = f"tinker://{run}/{check_kind(kind)}/{name}"
    parse_path(path)
    return await asyncio.to_thread(service.checkpoints.resolve, who.tenant, path)


def files_of(checkpoint: NamedCheckpoint) -> Snapshot:
    """The snapshot that a checkpoint is of.

    Raises:
        Refused: it was pruned.
    """
    version = checkpoint.version
    snapshot = version.checkpoint if checkpoint.kind is CheckpointKind.WEIGHTS else version.sampler
    if snapshot is None:
        raise Refused(f"checkpoint: the files of {checkpoint.path} were pruned")
    return snapshot


async def _directory(service: Serving, snapshot: Snapshot) -> Path:
    return await asyncio.to_thread(service.workspace.snapshots.fetch, snapshot.uri, snapshot.digest)
