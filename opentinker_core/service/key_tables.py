"""Tables of the service's API keys and of its audit log."""

from datetime import datetime
from typing import Any

from sqlalchemy import Index, String
from sqlalchemy.orm import Mapped, mapped_column

from opentinker_core.policies.tables import ID, NAME, Base, utc_now


class KeyRow(Base):
    """An API key. Its secret is not kept, only the SHA-256 of it."""

    __tablename__ = "ot_keys"
    __table_args__ = (Index(None, "tenant"),)

    key_id: Mapped[str] = mapped_column(String(ID), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(NAME))
    name: Mapped[str] = mapped_column(String(NAME))
    role: Mapped[str] = mapped_column(String(16))
    digest: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class AuditRow(Base):
    """A call that changed something, or tried to."""

    __tablename__ = "ot_audit"
    __table_args__ = (Index(None, "tenant", "id"), Index(None, "at"))

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(default=utc_now)
    tenant: Mapped[str] = mapped_column(String(NAME))
    key_id: Mapped[str] = mapped_column(String(ID))
    request_id: Mapped[str] = mapped_column(String(64))
    action: Mapped[str]
    subject: Mapped[dict[str, Any]]
    """Ids that the call named."""
    status: Mapped[int]
