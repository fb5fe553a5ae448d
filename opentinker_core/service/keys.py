"""API keys: made, listed, revoked, and looked up when a client shows one.

A key is `tml-<id>-<secret>`; the official SDK wants the beginning. Only the SHA-256 of it is kept: the
secret has 256 random bits, so that a slow hash would add nothing.
"""

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select

from opentinker_core.errors import NotFoundError, UsageError
from opentinker_core.names import check_name
from opentinker_core.policies.database import Database
from opentinker_core.policies.tables import utc_now
from opentinker_core.service.key_tables import KeyRow
from opentinker_core.service.principal import Principal, Role

REVOKED_AFTER_S = 2.0
"""How long a key is taken without asking the database again; so long a revoked one may still work."""

_ID = re.compile(r"[0-9a-f]{12}\Z")
_KEY = re.compile(r"tml-([0-9a-f]{12})-[A-Za-z0-9_-]{43}\Z")
_REMEMBERED = 4096
_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class ApiKey:
    """What is known of a key, besides its secret."""

    key_id: str
    tenant: str
    name: str
    role: Role
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None

    @property
    def active(self) -> bool:
        """Whether it is taken now."""
        return self.revoked_at is None and (self.expires_at is None or utc_now() < self.expires_at)


class Keys:
    """The keys of an installation, in its catalog database. Its methods wait for the database."""

    def __init__(self, url: str) -> None:
        """`url`: the catalog's."""
        self._database = Database(url)

    def close(self) -> None:
        """Close all connections."""
        self._database.close()

    def create(
        self, tenant: str, name: str, role: Role = Role.MEMBER, expires_in_days: float | None = None
    ) -> tuple[str, ApiKey]:
        """Make a key; gives the key itself, which cannot be shown again, and what is known of it.

        Raises:
            UsageError: tenant or name is not a name, or the days are not above 0.
        """
        check_name("tenant", tenant)
        check_name("name", name)
        if expires_in_days is not None and not 0 < expires_in_days <= 36500:
            raise UsageError(f"expires_in_days: {expires_in_days:g}; accepted: above 0, up to 36500")
        key_id = secrets.token_hex(6)
        key = f"tml-{key_id}-{secrets.token_urlsafe(32)}"
        now = utc_now()
        row = KeyRow(
            key_id=key_id,
            tenant=tenant,
            name=name,
            role=role.value,
            digest=_digest(key),
            created_at=now,
            expires_at=None if expires_in_days is None else now + timedelta(days=expires_in_days),
        )
        with self._database.write(tenant) as session:
            session.add(row)
            session.flush()
            return key, _value(row)

    def listed(self, tenant: str | None = None) -> list[ApiKey]:
        """The keys of a tenant, or of all, the oldest first; those that were revoked too."""
        query = select(KeyRow).order_by(KeyRow.created_at, KeyRow.key_id)
        if tenant is not None:
            query = query.where(KeyRow.tenant == tenant)
        with self._database.read() as session:
            return [_value(row) for row in session.scalars(query)]

    def revoke(self, key_id: str, tenant: str | None = None) -> ApiKey:
        """Take a key back: running servers refuse it within `REVOKED_AFTER_S`. It may be revoked already.

        Args:
            tenant: whose key it must be; None: anyone's.

        Raises:
            NotFoundError: there is no such key.
        """
        with self._database.write(tenant or "") as session:
            row = session.get(KeyRow, key_id) if _ID.match(key_id) else None
            if row is None or tenant not in (None, row.tenant):
                raise NotFoundError(f"key: there is none with the id {key_id!r:.80}")
            row.revoked_at = row.revoked_at or utc_now()
            return _value(row)

    def authenticate(self, key: str) -> Principal | None:
        """Whom a key stands for; None: it is not one, or not any more."""
        match = _KEY.match(key)
        if match is None:
            return None
        with self._database.read() as session:
            row = session.get(KeyRow, match[1])
            found = None if row is None else _value(row)
            digest = row.digest if row else _NO_DIGEST
        same = hmac.compare_digest(digest, _digest(key))
        if not same or found is None or not found.active:
            return None
        return Principal(found.tenant, found.role.value, found.key_id)


class KeyRing:
    """The keys that a server was shown lately, so that it does not ask the database at each request."""

    def __init__(self, keys: Keys, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._clock = clock
        self._seen: OrderedDict[str, tuple[float, Principal]] = OrderedDict()

    async def principal(self, key: str) -> Principal | None:
        """Whom a key stands for; None: it is not one, or not any more."""
        digest = _digest(key)
        seen = self._seen.get(digest)
        if seen is not None and self._clock() - seen[0] < REVOKED_AFTER_S:
            return seen[1]
        asked = self._clock()
        found = await asyncio.to_thread(self._keys.authenticate, key)
        if found is None:
            self._seen.pop(digest, None)
            return None
        self._seen[digest] = (asked, found)
        self._seen.move_to_end(digest)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return found


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _value(row: KeyRow) -> ApiKey:
    return ApiKey(
        row.key_id, row.tenant, row.name, Role(row.role), row.created_at, row.expires_at, row.revoked_at
    )
