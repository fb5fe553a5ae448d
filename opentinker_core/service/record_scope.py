"""What all parts of the service's records share: the database, and finding a tenant's rows."""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from opentinker_core.errors import NotFoundError
from opentinker_core.policies.database import Database
from opentinker_core.policies.tables import Base

Row = TypeVar("Row", bound=Base)

ID = re.compile(r"[A-Za-z0-9._:-]{1,127}\Z")
"""What ids look like; what does not is not looked for, for it may be no text that a database takes."""


class RecordScope:
    """The catalog's database, for the service's own tables."""

    def __init__(self, url: str, server: str = "") -> None:
        """Open them.

        Args:
            url: the catalog's.
            server: the installation that sessions are begun at; those of others are left to them.
        """
        self._database = Database(url)
        self._server = server

    def close(self) -> None:
        """Close all connections."""
        self._database.close()


def owned(session: Session, table: type[Row], tenant: str, field: str, key: str) -> Row:
    """The row of this key.

    Raises:
        NotFoundError: there is none, or it is another tenant's.
    """
    row = session.get(table, key) if ID.match(key) else None
    if row is None or getattr(row, "tenant", None) != tenant:
        raise NotFoundError(f"{field}: there is no {key!r:.100}")
    return row


def page(
    session: Session, table: Any, tenant: str, limit: int | None, offset: int, *where: Any
) -> tuple[Sequence[Any], int]:
    """The newest rows of a tenant, and how many there are."""
    mine = [table.tenant == tenant, *where]
    total = session.scalar(select(func.count()).select_from(table).where(*mine)) or 0
    newest = [table.created_at.desc(), *(column.desc() for column in table.__mapper__.primary_key)]
    query = select(table).where(*mine).order_by(*newest).offset(offset)
    return session.scalars(query.limit(limit)).all(), total
