"""Routes of what a tenant did, used and keeps: the audit log, tokens by the hour, checkpoints' storage."""

import asyncio
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import AwareDatetime

from opentinker_core.errors import UsageError
from opentinker_core.policies.tables import utc_now
from opentinker_core.service.audit import AuditEntry, AuditLog
from opentinker_core.service.dependencies import Serving
from opentinker_core.service.principal import Admin, Who
from opentinker_core.service.tinker.requests import check_text
from opentinker_core.service.tinker.sessions import texts
from opentinker_core.service.types import ServiceSession, Usage, UsageKind

router = APIRouter(prefix="/api/v1", tags=["usage"])

_EVENTS = {
    "POST /api/v1/save_weights": "checkpoint_create",
    "POST /api/v1/save_weights_for_sampler": "checkpoint_create",
    "POST /api/v1/save_weights_external": "checkpoint_create",
    "POST /api/v1/load_weights": "checkpoint_read",
    "POST /api/v1/copy_weights": "checkpoint_copy",
    "DELETE /api/v1/training_runs/{training_run_id}/checkpoints/{kind}/{name}": "checkpoint_delete",
    "PUT /api/v1/training_runs/{training_run_id}/checkpoints/{kind}/{name}/ttl": "checkpoint_ttl_set",
    "PUT /api/v1/sessions/{session_id}/project": "project_session_assign",
    "POST /api/v1/admin/keys": "organization_key_create",
    "DELETE /api/v1/admin/keys/{key_id}": "organization_key_revoke",
}
"""By action of our audit log: the event as `<resource>_<action>`."""
_RESOURCES = {
    "checkpoints": "checkpoint_",
    "projects": "project_",
    "teams": "team_",
    "organizations": "organization_",
}
_LONGEST = timedelta(days=14)
_LARGEST = 10_000
"""Entries of an answer; those beyond it are in `/api/v1/admin/audit`."""


@router.get("/audit")
async def audit_log(
    request: Request,
    who: Admin,
    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all",
    day: Annotated[date | None, Query()] = None,
) -> dict[str, Any]:
    """What was changed in the tenant on a day (UTC; today, if none is given), the oldest first.

    A call that is about none of the resources is an event of that call: `POST /api/v1/optim_step`.
    """
    log: AuditLog = request.app.state.audit
    begin = datetime.combine(day or utc_now().date(), time(), UTC)
    if begin > utc_now() + timedelta(days=1):  # the calendar itself ends somewhere
        raise UsageError(f"day: {day}; accepted: up to today (UTC)")
    kept = await asyncio.to_thread(log.between, who.tenant, begin, begin + timedelta(days=1), _LARGEST)
    named = [(_EVENTS.get(entry.action, entry.action), entry) for entry in kept]
    wanted = _RESOURCES.get(event_type, "")
    return {"entries": [_event(event, entry) for event, entry in named if event.startswith(wanted)]}


def _event(event: str, entry: AuditEntry) -> dict[str, Any]:
    about = {"key_id": entry.key_id, "request_id": entry.request_id, "status": entry.status}
    return {
        "timestamp": entry.at.isoformat(),
        "event": event,
        "event_details": {**entry.subject, **about, "action": entry.action},
        "model_id": entry.subject.get("model_id", entry.subject.get("training_run_id")),
        "tinker_path": entry.subject.get("tinker_path"),
    }


@router.get("/billing/usage/events")
async def usage_events(
    service: Serving, who: Who, starting_on: AwareDatetime, ending_before: AwareDatetime
) -> dict[str, Any]:
    """What the tenant used in each hour of a time, by session and base model; nothing has a price."""
    begin, end = _hour("starting_on", starting_on), _hour("ending_before", ending_before)
    if not begin < end <= begin + _LONGEST:
        raise UsageError(
            f"ending_before: {end.isoformat()}; accepted: after starting_on, by up to {_LONGEST.days} days"
        )
    await service.write(service.usage.keep)
    found = await service.read(lambda: service.records.usage(who.tenant, begin, end))
    ids = {usage.session_id for usage, _ in found if usage.session_id}
    sessions = await service.read(lambda: service.records.sessions_of(who.tenant, ids))
    return {
        "data": [_used(usage, amount, sessions.get(usage.session_id)) for usage, amount in found],
        "sessions": {one.session_id: {"user_metadata": texts(one)} for one in sessions.values()},
        "cost_data_through": None,
    }


def _hour(field: str, at: datetime) -> datetime:
    """Raise UsageError if a time is no full hour."""
    try:
        hour = at.astimezone(UTC)
    except (OverflowError, ValueError) as error:
        raise UsageError(f"{field}: {at}; accepted: a time of this age") from error
    if hour != hour.replace(minute=0, second=0, microsecond=0):
        raise UsageError(f"{field}: {hour.isoformat()}; accepted: a full hour (UTC)")
    return hour


def _used(usage: Usage, amount: int, session: ServiceSession | None) -> dict[str, Any]:
    info: dict[str, Any] = {"type": usage.kind.value}
    info["count" if usage.kind is UsageKind.CHECKPOINTS else "token_count"] = amount
    if usage.kind is UsageKind.PREFILL:
        info["cached"] = False  # what the sampler had already is not told apart
    return {
        "bucket_start": usage.hour.isoformat(),
        "bucket_end": (usage.hour + timedelta(hours=1)).isoformat(),
        "base_model": usage.base_model,
        "user_name": usage.tenant,
        "session_id": usage.session_id or None,
        "project_id": session.project_id if session else None,
        "event_info": info,
    }


@router.get("/billing/usage/checkpoints/current")
async def checkpoint_storage(
    service: Serving, who: Who, project_id: Annotated[str | None, Query()] = None
) -> dict[str, Any]:
    """How many named checkpoints the tenant has and what they take, by project; nothing has a price."""
    wanted = check_text("project_id", project_id)
    found = await asyncio.to_thread(service.records.checkpoint_storage, who.tenant, wanted)
    return {
        "effective_rate_usd_per_gigabyte_month": None,
        "data": [
            {
                "project_id": project,
                "org_user_urn": None,
                "user_email": None,
                "user_name": who.tenant,
                "checkpoint_count": count,
                "size_bytes": size,
                "size_gigabytes": size / 1e9,
                "estimated_monthly_cost_usd": None,
            }
            for project, count, size in found
        ],
    }
