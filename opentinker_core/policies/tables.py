"""The catalog's tables. Timestamps are UTC; every tenant's rows stand in the same tables.

Names begin with `ot_` and the schema revision has a table of its own, so that a catalog may share
one database with Prefect and MLflow.
"""

import math
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    MetaData,
    String,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.policies.refs import Ref
from opentinker_core.policies.types import Evaluation, Policy, PolicyVersion, Run, RunStatus, TrajectorySet
from opentinker_core.snapshots.protocol import Snapshot, SnapshotKind

ID = 32
NAME = 63


def utc_now() -> datetime:
    return datetime.now(UTC)


class UtcDateTime(TypeDecorator[datetime]):
    """An aware timestamp; SQLite keeps no zone, so UTC is what it means there."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value.astimezone(UTC) if value else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Metrics(TypeDecorator[dict[str, float]]):
    """Named numbers as JSON; what JSON has no number for (nan, inf) is kept as its name."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: dict[str, float] | None, dialect: Dialect) -> dict[str, Any] | None:
        numbers = {name: float(number) for name, number in (value or {}).items()}
        return {name: number if math.isfinite(number) else str(number) for name, number in numbers.items()}

    def process_result_value(self, value: dict[str, Any] | None, dialect: Dialect) -> dict[str, float]:
        return {name: float(number) for name, number in (value or {}).items()}


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012
        datetime: UtcDateTime(),
        float: Double(),
        dict[str, Any]: JSON(),
        dict[str, float]: Metrics(),
    }


class PolicyRow(Base):
    __tablename__ = "ot_policies"
    __table_args__ = (UniqueConstraint("tenant", "name"),)

    policy_id: Mapped[str] = mapped_column(String(ID), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(NAME))
    name: Mapped[str] = mapped_column(String(NAME))
    base_model: Mapped[str]
    lora: Mapped[dict[str, Any]]
    forked_from: Mapped[str | None]
    next_number: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)

    def value(self) -> Policy:
        lora = LoRAConfig.model_validate(self.lora)
        return Policy(
            self.policy_id, self.tenant, self.name, self.base_model, lora, self.created_at, self.forked_from
        )


class RunRow(Base):
    __tablename__ = "ot_runs"
    __table_args__ = (
        UniqueConstraint("tenant", "flow_run_id", "policy_id"),
        Index(None, "tenant", "name", "created_at"),
    )

    run_id: Mapped[str] = mapped_column(String(ID), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(NAME))
    name: Mapped[str] = mapped_column(String(NAME))
    policy_id: Mapped[str] = mapped_column(ForeignKey("ot_policies.policy_id"))
    config: Mapped[dict[str, Any]]
    config_digest: Mapped[str]
    code_commit: Mapped[str | None]
    status: Mapped[str]
    flow_run_id: Mapped[str | None]
    mlflow_run_id: Mapped[str | None]
    error: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    updated_at: Mapped[datetime] = mapped_column(default=utc_now, onupdate=utc_now)

    def value(self) -> Run:
        return Run(
            run_id=self.run_id,
            name=self.name,
            tenant=self.tenant,
            policy_id=self.policy_id,
            config=self.config,
            config_digest=self.config_digest,
            code_commit=self.code_commit,
            status=RunStatus(self.status),
            flow_run_id=self.flow_run_id,
            mlflow_run_id=self.mlflow_run_id,
            created_at=self.created_at,
            updated_at=self.updated_at,
            error=self.error,
        )


class NumberRow(Base):
    """A version number given to a step of a run, before there is a version."""

    __tablename__ = "ot_version_numbers"
    __table_args__ = (UniqueConstraint("policy_id", "run_id", "step"),)

    policy_id: Mapped[str] = mapped_column(ForeignKey("ot_policies.policy_id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    run_id: Mapped[str | None] = mapped_column(ForeignKey("ot_runs.run_id"))
    step: Mapped[int]


class VersionRow(Base):
    __tablename__ = "ot_versions"
    __table_args__ = (
        ForeignKeyConstraint(
            ["policy_id", "number"], ["ot_version_numbers.policy_id", "ot_version_numbers.number"]
        ),
        ForeignKeyConstraint(
            ["parent_policy_id", "parent_number"], ["ot_versions.policy_id", "ot_versions.number"]
        ),
        Index(None, "run_id"),
        Index(None, "checkpoint_uri"),
    )

    policy_id: Mapped[str] = mapped_column(String(ID), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sampler_uri: Mapped[str]
    sampler_digest: Mapped[str]
    sampler_size: Mapped[int] = mapped_column(BigInteger)
    checkpoint_uri: Mapped[str | None]
    """None once pruned; the digest stays."""
    checkpoint_digest: Mapped[str | None]
    checkpoint_size: Mapped[int | None] = mapped_column(BigInteger)
    parent_policy_id: Mapped[str | None] = mapped_column(String(ID))
    parent_number: Mapped[int | None]
    run_id: Mapped[str | None] = mapped_column(ForeignKey("ot_runs.run_id"))
    step: Mapped[int]
    phase: Mapped[str]
    metrics: Mapped[dict[str, float]]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)

    policy: Mapped[PolicyRow] = relationship(
        primaryjoin="foreign(VersionRow.policy_id) == PolicyRow.policy_id", viewonly=True, lazy="joined"
    )
    parent_policy: Mapped[PolicyRow | None] = relationship(
        primaryjoin="foreign(VersionRow.parent_policy_id) == PolicyRow.policy_id",
        viewonly=True,
        lazy="joined",
    )

    @property
    def ref(self) -> str:
        return str(Ref(self.policy.name, self.number))

    @property
    def checkpoint(self) -> Snapshot | None:
        if self.checkpoint_uri is None or self.checkpoint_digest is None:
            return None
        return Snapshot(
            SnapshotKind.CHECKPOINT, self.checkpoint_uri, self.checkpoint_digest, self.checkpoint_size or 0
        )

    def value(self) -> PolicyVersion:
        parent = self.parent_policy
        return PolicyVersion(
            policy_id=self.policy_id,
            policy_name=self.policy.name,
            number=self.number,
            sampler=Snapshot(SnapshotKind.SAMPLER, self.sampler_uri, self.sampler_digest, self.sampler_size),
            checkpoint=self.checkpoint,
            parent=str(Ref(parent.name, self.parent_number or 0)) if parent else None,
            run_id=self.run_id,
            step=self.step,
            phase=self.phase,
            metrics=self.metrics,
            created_at=self.created_at,
        )


class AliasRow(Base):
    __tablename__ = "ot_aliases"
    __table_args__ = (
        ForeignKeyConstraint(["policy_id", "number"], ["ot_versions.policy_id", "ot_versions.number"]),
    )

    policy_id: Mapped[str] = mapped_column(String(ID), primary_key=True)
    alias: Mapped[str] = mapped_column(String(NAME), primary_key=True)
    number: Mapped[int]
    updated_at: Mapped[datetime] = mapped_column(default=utc_now, onupdate=utc_now)


class TrajectorySetRow(Base):
    __tablename__ = "ot_trajectory_sets"
    __table_args__ = (
        UniqueConstraint("tenant", "set_id"),
        UniqueConstraint("run_id", "step", "purpose", "sampled_by"),
        ForeignKeyConstraint(
            ["sampled_policy_id", "sampled_number"], ["ot_versions.policy_id", "ot_versions.number"]
        ),
        Index(None, "sampled_policy_id", "sampled_number"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(String(NAME))
    set_id: Mapped[str]
    uri: Mapped[str]
    digest: Mapped[str]
    episodes: Mapped[int]
    tokens: Mapped[int] = mapped_column(BigInteger)
    environment: Mapped[str]
    sampled_by: Mapped[str]
    sampled_policy_id: Mapped[str | None] = mapped_column(String(ID))
    sampled_number: Mapped[int | None]
    run_id: Mapped[str | None] = mapped_column(ForeignKey("ot_runs.run_id"))
    step: Mapped[int]
    purpose: Mapped[str]
    reward_mean: Mapped[float | None]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)

    def value(self) -> TrajectorySet:
        return TrajectorySet(
            set_id=self.set_id,
            uri=self.uri,
            digest=self.digest,
            episodes=self.episodes,
            tokens=self.tokens,
            environment=self.environment,
            sampled_by=self.sampled_by,
            run_id=self.run_id or "",
            step=self.step,
            purpose=self.purpose,
            reward_mean=self.reward_mean,
            created_at=self.created_at,
        )


class TrainedOnRow(Base):
    """The lineage edge: this version was trained on this trajectory set."""

    __tablename__ = "ot_trained_on"
    __table_args__ = (
        ForeignKeyConstraint(["policy_id", "number"], ["ot_versions.policy_id", "ot_versions.number"]),
        Index(None, "trajectory_set"),
    )

    policy_id: Mapped[str] = mapped_column(String(ID), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    trajectory_set: Mapped[int] = mapped_column(ForeignKey("ot_trajectory_sets.id"), primary_key=True)


class EvaluationRow(Base):
    __tablename__ = "ot_evaluations"
    __table_args__ = (
        UniqueConstraint("run_id", "subject", "environment"),
        ForeignKeyConstraint(
            ["subject_policy_id", "subject_number"], ["ot_versions.policy_id", "ot_versions.number"]
        ),
        Index(None, "tenant", "subject"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(String(NAME))
    subject: Mapped[str]
    subject_policy_id: Mapped[str | None] = mapped_column(String(ID))
    subject_number: Mapped[int | None]
    run_id: Mapped[str | None] = mapped_column(ForeignKey("ot_runs.run_id"))
    step: Mapped[int]
    environment: Mapped[str]
    mean: Mapped[float]
    low: Mapped[float]
    high: Mapped[float]
    episodes: Mapped[int]
    trajectory_set: Mapped[int | None] = mapped_column(ForeignKey("ot_trajectory_sets.id"))
    details: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)

    trajectories: Mapped[TrajectorySetRow | None] = relationship(lazy="joined", viewonly=True)

    def value(self) -> Evaluation:
        return Evaluation(
            subject=self.subject,
            run_id=self.run_id,
            step=self.step,
            environment=self.environment,
            mean=self.mean,
            low=self.low,
            high=self.high,
            episodes=self.episodes,
            trajectory_set=self.trajectories.value() if self.trajectories else None,
            details=self.details,
        )


class OutboxRow(Base):
    """An event for the lineage recorder, written in the transaction that it tells of."""

    __tablename__ = "ot_outbox"
    __table_args__ = (Index(None, "tenant", "delivered_at", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(String(NAME))
    kind: Mapped[str]
    payload: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    delivered_at: Mapped[datetime | None]
    attempts: Mapped[int] = mapped_column(default=0)
    last_error: Mapped[str | None]
