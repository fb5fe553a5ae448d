"""The audit log: which key did what, to what, and whether it was done. Written in groups, a moment later."""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, insert, select

from opentinker_core.errors import OpenTinkerError
from opentinker_core.policies.database import Database
from opentinker_core.policies.tables import utc_now
from opentinker_core.service.key_tables import AuditRow
from opentinker_core.service.principal import Principal
from opentinker_core.service.routes import UNCHANGING

_LOG = logging.getLogger(__name__)
_WRITE_EVERY_S = 0.25
_PRUNE_EVERY_S = 3600.0
_WARN_EVERY_S = 60.0
"""A full disk stays full for long."""
_KEPT = 100_000
"""Calls that wait for a database which does not answer; beyond that the oldest are only in the log."""
_SUBJECTS = (
    "session_id",
    "model_id",
    "model_seq_id",
    "seq_id",
    "sampling_session_id",
    "base_model",
    "path",
    "tinker_path",
    "source_path",
    "request_id",
    "key_id",
    "tenant",
    "name",
)
"""Fields of a JSON body that say what a call is about."""


@dataclass
class Call:
    """A request on its way: what the audit log will say that it was about."""

    method: str
    path: str
    subject: dict[str, str | int] = field(default_factory=dict)
    """Routes add what neither path nor JSON tells."""
    body: bytes = b""
    """Empty where it is large."""

    def named(self, path_params: dict[str, Any]) -> dict[str, str | int]:
        """Ids in the path, in a JSON body, and those that the route added."""
        found: dict[str, str | int] = {name: str(value) for name, value in path_params.items()}
        try:
            data = json.loads(self.body) if self.body.lstrip()[:1] == b"{" else {}
        except (ValueError, RecursionError):
            data = {}
        for name in _SUBJECTS:
            value = data.get(name)
            if isinstance(value, str) or (isinstance(value, int) and abs(value) < 1 << 53):
                found[name] = value
        named = {**found, **self.subject}
        return {name: _shown(value) if isinstance(value, str) else value for name, value in named.items()}


@dataclass(frozen=True)
class AuditEntry:
    """A line of the audit log."""

    number: int
    at: datetime
    key_id: str
    request_id: str
    action: str
    subject: dict[str, Any]
    status: int


class AuditLog:
    """The audit log of all tenants, in the catalog database."""

    def __init__(self, url: str, keep_days: int = 90) -> None:
        """`url`: the catalog's."""
        self._database = Database(url)
        self._keep = timedelta(days=keep_days)
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._writer: asyncio.Task[None] | None = None
        self._warned: float | None = None

    def add(
        self,
        who: Principal,
        request_id: str,
        route: str,
        status: int,
        call: Call,
        path_params: dict[str, Any] | None = None,
    ) -> None:
        """Note a call, unless it is one that changes nothing. Does not wait for the database."""
        if call.method in ("GET", "HEAD", "OPTIONS") or route in UNCHANGING:
            return
        self._waiting.append(
            {
                "at": utc_now(),
                "tenant": who.tenant,
                "key_id": who.key_id,
                "request_id": request_id,
                "action": f"{call.method} {route}",
                "subject": call.named(path_params or {}),
                "status": status,
            }
        )

    async def start(self) -> None:
        """Begin to write what is added."""
        self._writer = asyncio.create_task(self._write_on())

    async def stop(self) -> None:
        """Write what waits and close the database."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        await asyncio.to_thread(self._write)
        self._database.close()

    def entries(self, tenant: str, limit: int = 100, before: int | None = None) -> list[AuditEntry]:
        """A tenant's calls, the newest first; `before`: those with a smaller number."""
        query = select(AuditRow).where(AuditRow.tenant == tenant).order_by(AuditRow.id.desc()).limit(limit)
        if before is not None:
            query = query.where(AuditRow.id < before)
        with self._database.read() as session:
            return [_value(row) for row in session.scalars(query)]

    def between(self, tenant: str, begin: datetime, end: datetime, limit: int) -> list[AuditEntry]:
        """A tenant's calls since `begin` and before `end`, the oldest first."""
        query = select(AuditRow).where(AuditRow.tenant == tenant, AuditRow.at >= begin, AuditRow.at < end)
        with self._database.read() as session:
            return [_value(row) for row in session.scalars(query.order_by(AuditRow.id).limit(limit))]

    async def _write_on(self) -> None:
        pruned = 0.0
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_WRITE_EVERY_S)
            await asyncio.to_thread(self._write)
            if loop.time() > pruned + _PRUNE_EVERY_S:
                pruned = loop.time()
                await asyncio.to_thread(self._prune)

    def _write(self) -> None:
        """Write what waits in one transaction; it waits on if the database does not answer."""
        rows = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not rows:
            return
        try:
            self._insert(rows)
        except OpenTinkerError as error:
            self._waiting.extendleft(reversed(rows))
            self._warn("%d calls are not in the audit log yet: %s", len(rows), error)
        except Exception:  # noqa: BLE001 - what comes later is to be written nevertheless
            _LOG.exception("%d calls could not be written into the audit log", len(rows))

    def _warn(self, message: str, *values: object) -> None:
        now = time.monotonic()
        if self._warned is None or now - self._warned >= _WARN_EVERY_S:
            self._warned = now
            _LOG.warning(message, *values)

    def _insert(self, rows: Sequence[dict[str, Any]]) -> None:
        with self._database.write("") as session:
            session.execute(insert(AuditRow), rows)

    def _prune(self) -> None:
        try:
            with self._database.write("") as session:
                session.execute(delete(AuditRow).where(AuditRow.at < utc_now() - self._keep))
        except OpenTinkerError as error:
            self._warn("old calls stay in the audit log: %s", error)
        except Exception:  # noqa: BLE001 - calls are to be written, whether old ones go or not
            _LOG.exception("old calls stay in the audit log")


def _shown(text: str) -> str:
    """The beginning of what a client sent, as a text that can be kept and answered."""
    return text[:200].encode("utf-8", "replace").decode()


def _value(row: AuditRow) -> AuditEntry:
    return AuditEntry(row.id, row.at, row.key_id, row.request_id, row.action, row.subject, row.status)
