"""Sessions of clients: begun, kept alive by heartbeats, ended by the client or by its silence."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from opentinker_core.errors import NotFoundError
from opentinker_core.policies.tables import utc_now
from opentinker_core.policies.types import RunStatus
from opentinker_core.service.errors import Gone
from opentinker_core.service.types import ServiceSession, SessionStatus

if TYPE_CHECKING:
    from opentinker_core.service.core import Service

_LOG = logging.getLogger(__name__)

_AT_ONCE = 32
"""Sessions that are ended at the same time because they fell silent."""


class Sessions:
    """The sessions that are live, and when each was last heard of. Used on the event loop."""

    def __init__(self, service: "Service") -> None:
        self._service = service
        self._live: dict[str, str] = {}
        """Session id → tenant."""
        self._seen: dict[str, float] = {}
        """When each was last heard of, by a clock that nobody sets."""
        self._noted: dict[str, float] = {}

    async def start(self) -> None:
        """Take up the sessions of the last server; the time it was away does not count against them."""
        for session in await asyncio.to_thread(self._service.records.live_sessions):
            self._live[session.session_id] = session.tenant
            self._seen[session.session_id] = time.monotonic()

    async def stop(self) -> None:
        """Note when sessions were last heard of; they are live when the next server starts."""
        await self._note()

    async def begin(
        self,
        tenant: str,
        *,
        tags: Sequence[str],
        user_metadata: Mapping[str, Any] | None,
        sdk_version: str,
        project_id: str | None,
        display_name: str | None,
    ) -> ServiceSession:
        """A new session."""
        records = self._service.records
        session = await self._service.write(
            lambda: records.add_session(
                tenant,
                secrets.token_hex(8),
                tags=tags,
                user_metadata=user_metadata,
                sdk_version=sdk_version,
                project_id=project_id,
                display_name=display_name,
            )
        )
        self._live[session.session_id] = tenant
        self._seen[session.session_id] = time.monotonic()
        return session

    async def check_live(self, tenant: str, session_id: str) -> None:
        """Note that a session is used.

        Raises:
            NotFoundError: the tenant has no such session.
            Gone: it has ended.
        """
        if self._live.get(session_id) != tenant:
            ended = await self._ended(tenant, session_id)
            raise Gone(f"session_id: {session_id} is {ended}; accepted: a session that is live")
        self._seen[session_id] = time.monotonic()

    async def _ended(self, tenant: str, session_id: str) -> SessionStatus:
        """How a session that is not live here has ended.

        Raises:
            NotFoundError: the tenant has no such session.
            Gone: it is live at another server.
        """
        found = await asyncio.to_thread(self._service.records.session, tenant, session_id)
        if found.status is SessionStatus.LIVE:
            raise Gone(f"session_id: {session_id} is of another server; accepted: one begun here")
        return found.status

    def has(self, session_id: str) -> bool:
        """Whether a session is live, and here."""
        return session_id in self._live

    def touch(self, tenant: str, session_id: str) -> None:
        """Note that something of a session is used, if it is live."""
        if self._live.get(session_id) == tenant:
            self._seen[session_id] = time.monotonic()

    async def end(
        self, tenant: str, session_id: str, status: SessionStatus, run: RunStatus, detail: str | None = None
    ) -> None:
        """Release what a session holds; a second call does nothing more.

        Raises:
            NotFoundError: the tenant has no such session.
            Gone: it is live at another server, which alone can release what it holds.
        """
        if self._live.get(session_id) != tenant:
            await self._ended(tenant, session_id)
            return
        records = self._service.records
        with contextlib.suppress(NotFoundError):  # what is held here is released, whatever the database says
            await self._service.write(lambda: records.end_session(tenant, session_id, status, detail))
        if self._live.pop(session_id, None) is None:
            return
        self._seen.pop(session_id, None)
        self._service.futures.forget(session_id)
        await self._service.training.release(session_id, run)
        await self._release_versions(tenant, session_id)
        await self._service.write(lambda: records.forget_results(session_id=session_id))

    async def _release_versions(self, tenant: str, session_id: str) -> None:
        """Delete the weights that were saved for samplers of the session alone."""
        service = self._service
        samplers = await asyncio.to_thread(service.records.samplers, tenant, session_id)
        versions = {one.version.ref: one.version for one in samplers if one.version is not None}
        for version in versions.values():
            await service.write(partial(service.checkpoints.release, tenant, version))

    async def sweep(self) -> None:
        """End the sessions that were silent for too long, and note when the others were heard of."""
        limit = time.monotonic() - self._service.config.session_timeout_s
        silent = [(key, tenant) for key, tenant in self._live.items() if self._seen[key] < limit]
        # Several at once: each waits for its turn in the engine, and more could fall silent than end in turn.
        for first in range(0, len(silent), _AT_ONCE):
            await asyncio.gather(*(self._expire(*one, limit) for one in silent[first : first + _AT_ONCE]))
        await self._note()

    async def _expire(self, session_id: str, tenant: str, limit: float) -> None:
        seen = self._seen.get(session_id)
        if seen is None or seen >= limit:  # it ended, or was heard of, while others were being ended
            return
        _LOG.info("session %s of tenant %s was silent for too long", session_id, tenant)
        await self.end(tenant, session_id, SessionStatus.EXPIRED, RunStatus.FAILED, "no heartbeat")

    @property
    def live(self) -> int:
        """Sessions that have not ended."""
        return len(self._live)

    async def _note(self) -> None:
        now, monotonic = utc_now(), time.monotonic()
        changed = {
            key: now - timedelta(seconds=monotonic - at)
            for key, at in self._seen.items()
            if self._noted.get(key) != at
        }
        self._noted = dict(self._seen)
        await self._service.write(lambda: self._service.records.note_seen(changed))
