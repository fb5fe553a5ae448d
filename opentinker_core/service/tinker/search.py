"""The route that searches a tenant's sessions."""

import asyncio
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from tinker.types.session_search_request import SessionSearchRequest

from opentinker_core.errors import UsageError
from opentinker_core.service.dependencies import Serving
from opentinker_core.service.principal import Who
from opentinker_core.service.tinker.requests import check_text
from opentinker_core.service.types import NamedCheckpoint, ServiceSession, SessionStatus

router = APIRouter(prefix="/api/v1", tags=["sessions"])

_BATCH = 500
_LOOKED_AT = 20_000
"""Sessions that one call looks at; the next page goes on behind them."""


@router.post("/sessions/search")
async def search_sessions(service: Serving, who: Who, body: SessionSearchRequest) -> dict[str, Any]:
    """The tenant's sessions that fit, the newest first; `owner` is the tenant, whatever is asked."""
    last = None
    if body.cursor is not None:
        last = _position(body.cursor.last_created_at, body.cursor.last_session_id)
    found: list[ServiceSession] = []
    looked_at = 0
    while len(found) < body.limit and looked_at < _LOOKED_AT:
        batch = await asyncio.to_thread(service.records.sessions_before, who.tenant, last, _BATCH)
        for session in batch:
            last = (session.created_at, session.session_id)
            if _fits(session, body):
                found.append(session)
            if len(found) == body.limit:
                break
        looked_at += len(batch)
        if len(batch) < _BATCH:
            last = last if len(found) == body.limit else None
            break
    kept = await asyncio.to_thread(service.records.checkpoints_of, who.tenant, [s.session_id for s in found])
    cursor = None if last is None else {"last_created_at": last[0].isoformat(), "last_session_id": last[1]}
    summaries = [_summary(session, kept.get(session.session_id, [])) for session in found]
    return {"sessions": summaries, "next_cursor": cursor}


def _position(created_at: datetime, session_id: str) -> tuple[datetime, str]:
    """Where a page begins.

    Raises:
        UsageError: it is no cursor of ours.
    """
    try:
        at = created_at.astimezone(UTC)
    except (OverflowError, ValueError) as error:
        raise UsageError(f"cursor.last_created_at: {created_at}; accepted: a next_cursor") from error
    return at, (check_text("cursor.last_session_id", session_id) or "")[:100]


def _fits(session: ServiceSession, body: SessionSearchRequest) -> bool:
    if body.project_ids is not None and session.project_id not in body.project_ids:
        return False
    if any(session.user_metadata.get(key) != value for key, value in body.user_metadata.items()):
        return False
    if body.statuses is not None and not any(_has_status(session, one) for one in body.statuses):
        return False
    wanted = [session.session_id == body.session_id] if body.session_id is not None else []
    if body.display_name is not None:
        name = (session.display_name or "").casefold()
        wanted.append(all(word in name for word in body.display_name.casefold().split()))
    return any(wanted) if wanted else True


def _has_status(session: ServiceSession, query: Any) -> bool:
    if query.type == "active":
        return session.status is SessionStatus.LIVE
    if query.type == "client_finished":
        finished = session.status is SessionStatus.FINISHED
        return finished and (query.reasons is None or session.detail in query.reasons)
    return False


def _summary(session: ServiceSession, kept: list[NamedCheckpoint]) -> dict[str, Any]:
    status: dict[str, Any] | None = None
    if session.status is SessionStatus.LIVE:
        status = {"type": "active"}
    elif session.status is SessionStatus.FINISHED:
        status = {"type": "client_finished", "reason": {"type": session.detail or "success"}}
    return {
        "session_id": session.session_id,
        "created_at": session.created_at.isoformat(),
        "owner": session.tenant,
        "project_id": session.project_id or "",
        "status": status,
        "checkpoints_count": len(kept),
        "display_name": session.display_name,
        "user_metadata": {name: str(value) for name, value in session.user_metadata.items()},
        "checkpoint_storage_bytes": sum(one.size_bytes for one in kept),
    }
