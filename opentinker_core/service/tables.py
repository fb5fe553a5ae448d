"""The service's tables: sessions, models, samplers, checkpoints, usage, futures."""

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, ForeignKeyConstraint, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column, relationship

from opentinker_core.policies.tables import ID, NAME, Base, PolicyRow, VersionRow, utc_now
from opentinker_core.service.types import (
    CheckpointKind,
    Model,
    ModelStatus,
    NamedCheckpoint,
    SamplerHandle,
    ServiceSession,
    SessionStatus,
)

OBJECT_ID = 63
"""`<session>:train:<n>`, `<session>:sample:<n>`."""
REQUEST_ID = 127


class SessionRow(Base):
    __tablename__ = "ot_sessions"
    __table_args__ = (Index(None, "tenant", "created_at"), Index(None, "status"))

    session_id: Mapped[str] = mapped_column(String(ID), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(NAME))
    server: Mapped[str] = mapped_column(String(ID))
    """The installation that holds what the session trains; servers may share a database."""
    tags: Mapped[list[str]] = mapped_column(JSON())
    user_metadata: Mapped[dict[str, Any]]
    sdk_version: Mapped[str]
    project_id: Mapped[str | None]
    display_name: Mapped[str | None]
    status: Mapped[str]
    detail: Mapped[str | None]
    """What the client said when it finished."""
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    seen_at: Mapped[datetime] = mapped_column(default=utc_now)
    """The last heartbeat or request, to within a sweep."""

    def value(self) -> ServiceSession:
        return ServiceSession(
            session_id=self.session_id,
            tenant=self.tenant,
            tags=tuple(self.tags),
            user_metadata=self.user_metadata,
            sdk_version=self.sdk_version,
            project_id=self.project_id,
            display_name=self.display_name,
            status=SessionStatus(self.status),
            detail=self.detail,
            created_at=self.created_at,
            seen_at=self.seen_at,
        )


class ModelRow(Base):
    __tablename__ = "ot_models"
    __table_args__ = (Index(None, "tenant", "created_at"), Index(None, "session_id"))

    model_id: Mapped[str] = mapped_column(String(OBJECT_ID), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(NAME))
    session_id: Mapped[str] = mapped_column(ForeignKey("ot_sessions.session_id"))
    policy_id: Mapped[str] = mapped_column(ForeignKey("ot_policies.policy_id"))
    run_id: Mapped[str] = mapped_column(ForeignKey("ot_runs.run_id"))
    base_model: Mapped[str]
    lora: Mapped[dict[str, Any]]
    user_metadata: Mapped[dict[str, Any]]
    digest: Mapped[str]
    status: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    used_at: Mapped[datetime] = mapped_column(default=utc_now)

    policy: Mapped[PolicyRow] = relationship(viewonly=True, lazy="joined")

    def value(self) -> Model:
        return Model(
            model_id=self.model_id,
            tenant=self.tenant,
            session_id=self.session_id,
            policy_id=self.policy_id,
            policy_name=self.policy.name,
            run_id=self.run_id,
            base_model=self.base_model,
            lora=self.lora,
            user_metadata=self.user_metadata,
            digest=self.digest,
            status=ModelStatus(self.status),
            created_at=self.created_at,
            used_at=self.used_at,
        )


class SamplerRow(Base):
    __tablename__ = "ot_samplers"
    __table_args__ = (
        ForeignKeyConstraint(["policy_id", "number"], ["ot_versions.policy_id", "ot_versions.number"]),
        Index(None, "session_id"),
        Index(None, "inflight_of"),
    )

    sampler_id: Mapped[str] = mapped_column(String(OBJECT_ID), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(NAME))
    session_id: Mapped[str] = mapped_column(ForeignKey("ot_sessions.session_id"))
    base_model: Mapped[str]
    model_path: Mapped[str | None]
    policy_id: Mapped[str | None] = mapped_column(String(ID))
    number: Mapped[int | None]
    inflight_of: Mapped[str | None] = mapped_column(String(OBJECT_ID))
    """The model whose inflight saves change the version."""
    created_at: Mapped[datetime] = mapped_column(default=utc_now)

    version: Mapped[VersionRow | None] = relationship(viewonly=True, lazy="joined")

    def value(self) -> SamplerHandle:
        return SamplerHandle(
            sampler_id=self.sampler_id,
            tenant=self.tenant,
            session_id=self.session_id,
            base_model=self.base_model,
            model_path=self.model_path,
            version=self.version.value() if self.version else None,
            inflight_of=self.inflight_of,
        )


class CheckpointRow(Base):
    __tablename__ = "ot_checkpoints"
    __table_args__ = (
        UniqueConstraint("model_id", "kind", "name"),
        ForeignKeyConstraint(["policy_id", "number"], ["ot_versions.policy_id", "ot_versions.number"]),
        Index(None, "tenant", "created_at"),
        Index(None, "policy_id", "number"),
        Index(None, "expires_at"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(String(NAME))
    model_id: Mapped[str] = mapped_column(ForeignKey("ot_models.model_id"))
    kind: Mapped[str] = mapped_column(String(NAME))
    name: Mapped[str] = mapped_column(String(NAME))
    policy_id: Mapped[str] = mapped_column(String(ID))
    number: Mapped[int]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    user_metadata: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    expires_at: Mapped[datetime | None]

    version: Mapped[VersionRow] = relationship(viewonly=True, lazy="joined")

    def value(self) -> NamedCheckpoint:
        return NamedCheckpoint(
            model_id=self.model_id,
            tenant=self.tenant,
            kind=CheckpointKind(self.kind),
            name=self.name,
            version=self.version.value(),
            size_bytes=self.size_bytes,
            user_metadata=self.user_metadata,
            created_at=self.created_at,
            expires_at=self.expires_at,
        )


class UsageRow(Base):
    """An amount of tokens or checkpoints."""

    __tablename__ = "ot_usage"
    __table_args__ = (UniqueConstraint("tenant", "hour", "kind", "base_model", "session_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(String(NAME))
    hour: Mapped[datetime]
    kind: Mapped[str] = mapped_column(String(ID))
    base_model: Mapped[str]
    session_id: Mapped[str] = mapped_column(String(ID))
    """Empty: of no session."""
    amount: Mapped[int] = mapped_column(BigInteger)


class FutureRow(Base):
    """The result of a request, for a client that asks for it (again) after a restart."""

    __tablename__ = "ot_futures"
    __table_args__ = (Index(None, "created_at"), Index(None, "session_id"))

    request_id: Mapped[str] = mapped_column(String(REQUEST_ID), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(NAME))
    session_id: Mapped[str] = mapped_column(String(ID))
    digest: Mapped[str]
    media_type: Mapped[str]
    body: Mapped[bytes]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
