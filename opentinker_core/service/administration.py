"""Routes for a tenant's administrators: its keys and its audit log; and for anyone, whose key this is."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from opentinker_core.service.audit import AuditLog
from opentinker_core.service.errors import Refused
from opentinker_core.service.keys import ApiKey, Keys
from opentinker_core.service.principal import Admin, Role, Who

router = APIRouter(prefix="/api/v1/admin", tags=["administration"])


class NewKey(BaseModel):
    """A key to make for the caller's own tenant."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=63)]
    role: Role = Role.MEMBER
    expires_in_days: Annotated[float, Field(gt=0, le=36500)] | None = None


class KeyAnswer(BaseModel):
    """What is known of a key."""

    key_id: str
    tenant: str
    name: str
    role: Role
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class NewKeyAnswer(KeyAnswer):
    """A key that was made; it is shown here and never again."""

    key: str


class KeysAnswer(BaseModel):
    """The keys of a tenant."""

    keys: list[KeyAnswer]


class AuditAnswer(BaseModel):
    """Lines of the audit log, the newest first; `next` is where the following page begins."""

    entries: list[dict[str, Any]]
    next: int | None


@router.get("/whoami")
async def whoami(who: Who) -> dict[str, str]:
    """The tenant and role of the key."""
    return {"tenant": who.tenant, "role": who.role, "key_id": who.key_id}


@router.post("/keys", status_code=201)
async def create_key(request: Request, who: Admin, new: NewKey) -> NewKeyAnswer:
    """Make a key for the caller's tenant."""
    keys: Keys = request.app.state.keys
    key, made = await run_in_threadpool(keys.create, who.tenant, new.name, new.role, new.expires_in_days)
    return NewKeyAnswer(key=key, **_shown(made))


@router.get("/keys")
async def list_keys(request: Request, who: Admin) -> KeysAnswer:
    """The keys of the caller's tenant, those that were revoked too."""
    keys: Keys = request.app.state.keys
    found = await run_in_threadpool(keys.listed, who.tenant)
    return KeysAnswer(keys=[KeyAnswer(**_shown(key)) for key in found])


@router.delete("/keys/{key_id}")
async def revoke_key(request: Request, who: Admin, key_id: str) -> KeyAnswer:
    """Revoke a key of the caller's tenant, but not the one that the caller shows."""
    if key_id == who.key_id:
        raise Refused("key_id: this call's own key; accepted: another one")
    keys: Keys = request.app.state.keys
    return KeyAnswer(**_shown(await run_in_threadpool(keys.revoke, key_id, who.tenant)))


@router.get("/audit")
async def audit(
    request: Request,
    who: Admin,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=1, lt=1 << 62)] = None,
) -> AuditAnswer:
    """What was changed in the caller's tenant, by which key."""
    log: AuditLog = request.app.state.audit
    found = await run_in_threadpool(log.entries, who.tenant, limit, before)
    entries = [{**vars(entry), "at": entry.at.isoformat()} for entry in found]
    return AuditAnswer(entries=entries, next=found[-1].number if len(found) == limit else None)


def _shown(key: ApiKey) -> dict[str, Any]:
    return vars(key)
