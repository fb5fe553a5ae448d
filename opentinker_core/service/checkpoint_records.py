"""Records of what is kept: named checkpoints, and the results of futures."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, case, delete, func, insert, select
from sqlalchemy.orm import Session

from opentinker_core.errors import NotFoundError, UsageError
from opentinker_core.policies.tables import PolicyRow, VersionRow, utc_now
from opentinker_core.service.record_scope import ID, RecordScope, owned, page
from opentinker_core.service.tables import CheckpointRow, FutureRow, ModelRow, SamplerRow, SessionRow
from opentinker_core.service.types import CheckpointKind, NamedCheckpoint, SessionStatus, StoredResult


class CheckpointRecords(RecordScope):
    """The named checkpoints of all tenants."""

    def add_checkpoint(
        self,
        tenant: str,
        model_id: str,
        kind: CheckpointKind,
        name: str,
        *,
        version: tuple[str, int],
        size_bytes: int,
        user_metadata: Mapping[str, str] | None = None,
        expires_at: datetime | None = None,
        overwrite: bool = False,
    ) -> NamedCheckpoint:
        """Give a version of a policy a name below its model.

        Raises:
            UsageError: the name is taken, and not by this version.
        """
        with self._database.write(tenant) as session:
            owned(session, ModelRow, tenant, "model_id", model_id)
            row = _named(session, tenant, model_id, kind, name)
            if row is not None and not overwrite and (row.policy_id, row.number) != version:
                raise _taken(kind, name)
            if row is None:
                row = CheckpointRow(tenant=tenant, model_id=model_id, kind=kind.value, name=name)
                session.add(row)
            row.policy_id, row.number = version
            row.size_bytes, row.expires_at, row.created_at = size_bytes, expires_at, utc_now()
            row.user_metadata = dict(user_metadata or {})
            session.flush()
            session.refresh(row)
            return row.value()

    def check_free(self, tenant: str, model_id: str, kind: CheckpointKind, name: str) -> None:
        """Raise UsageError if the name is taken."""
        with self._database.read() as session:
            if _named(session, tenant, model_id, kind, name) is not None:
                raise _taken(kind, name)

    def find_checkpoint(
        self, tenant: str, model_id: str, kind: CheckpointKind, name: str
    ) -> NamedCheckpoint | None:
        """The checkpoint of this name, expired or not, if there is one."""
        with self._database.read() as session:
            row = _named(session, tenant, model_id, kind, name)
            return row.value() if row is not None else None

    def checkpoint(self, tenant: str, model_id: str, kind: CheckpointKind, name: str) -> NamedCheckpoint:
        """The checkpoint of this name, unless it has expired."""
        with self._database.read() as session:
            row = _named(session, tenant, model_id, kind, name)
            if row is None or _is_over(row):
                raise NotFoundError(f"path: there is no tinker://{model_id:.80}/{kind}/{name:.80}")
            return row.value()

    def checkpoints(
        self, tenant: str, model_id: str | None = None, limit: int | None = None, offset: int = 0
    ) -> tuple[list[NamedCheckpoint], int]:
        """The newest first, of one model or of all, and how many there are."""
        with self._database.read() as session:
            where: list[Any] = [_is_kept()]
            if model_id is not None:
                owned(session, ModelRow, tenant, "model_id", model_id)
                where.append(CheckpointRow.model_id == model_id)
            rows, total = page(session, CheckpointRow, tenant, limit, offset, *where)
            return [row.value() for row in rows], total

    def set_expiry(
        self, tenant: str, model_id: str, kind: CheckpointKind, name: str, expires_at: datetime | None
    ) -> NamedCheckpoint:
        """Let a checkpoint expire then; None: never."""
        with self._database.write(tenant) as session:
            row = _named(session, tenant, model_id, kind, name)
            if row is None or _is_over(row):
                raise NotFoundError(f"path: there is no tinker://{model_id:.80}/{kind}/{name:.80}")
            row.expires_at = expires_at
            session.flush()
            return row.value()

    def delete_checkpoint(
        self, tenant: str, model_id: str, kind: CheckpointKind, name: str
    ) -> NamedCheckpoint:
        """Forget a name; what it named is as it was (see `checkpoints.Checkpoints.delete`)."""
        with self._database.write(tenant) as session:
            row = _named(session, tenant, model_id, kind, name)
            if row is None:
                raise NotFoundError(f"path: there is no tinker://{model_id:.80}/{kind}/{name:.80}")
            value = row.value()
            session.delete(row)
            return value

    def names_of(self, tenant: str, version: tuple[str, int]) -> list[NamedCheckpoint]:
        """The names that a version has, of all models of the tenant."""
        with self._database.read() as session:
            query = select(CheckpointRow).filter_by(tenant=tenant, policy_id=version[0], number=version[1])
            return [row.value() for row in session.scalars(query)]

    def checkpoints_of(self, tenant: str, session_ids: Collection[str]) -> dict[str, list[NamedCheckpoint]]:
        """The checkpoints of the models of sessions, by session."""
        with self._database.read() as session:
            query = (
                select(ModelRow.session_id, CheckpointRow)
                .join(CheckpointRow, CheckpointRow.model_id == ModelRow.model_id)
                .where(ModelRow.tenant == tenant, ModelRow.session_id.in_(session_ids), _is_kept())
            )
            found: dict[str, list[NamedCheckpoint]] = {}
            for session_id, row in session.execute(query):
                found.setdefault(session_id, []).append(row.value())
            return found

    def is_used(self, tenant: str, version: tuple[str, int]) -> bool:
        """Whether a version has a name, or a sampler whose session is live."""
        with self._database.read() as session:
            samplers = (
                select(SamplerRow.sampler_id)
                .join(SessionRow, SessionRow.session_id == SamplerRow.session_id)
                .where(
                    SamplerRow.policy_id == version[0],
                    SamplerRow.number == version[1],
                    SessionRow.status == SessionStatus.LIVE.value,
                )
            )
            names = select(CheckpointRow.id).filter_by(tenant=tenant, policy_id=version[0], number=version[1])
            return any(session.scalars(query.limit(1)).first() is not None for query in (names, samplers))

    def expired_checkpoints(self) -> list[NamedCheckpoint]:
        """Those of all tenants whose time is over: for the sweep alone."""
        with self._database.read() as session:
            query = select(CheckpointRow).where(CheckpointRow.expires_at <= utc_now())
            return [row.value() for row in session.scalars(query)]

    def newest_checkpoints(
        self, tenant: str, model_ids: Collection[str]
    ) -> dict[tuple[str, CheckpointKind], NamedCheckpoint]:
        """Of each model and kind the newest checkpoint, in one query."""
        with self._database.read() as session:
            query = select(CheckpointRow).where(
                CheckpointRow.tenant == tenant, CheckpointRow.model_id.in_(model_ids), _is_kept()
            )
            rows = session.scalars(query.order_by(CheckpointRow.created_at))
            return {(row.model_id, CheckpointKind(row.kind)): row.value() for row in rows}

    def checkpoint_storage(
        self, tenant: str, project_id: str | None = None
    ) -> list[tuple[str | None, int, int]]:
        """By project, or of one: how many checkpoints there are, and their bytes."""
        query = (
            select(SessionRow.project_id, func.count(), func.sum(CheckpointRow.size_bytes))
            .join(ModelRow, ModelRow.session_id == SessionRow.session_id)
            .join(CheckpointRow, CheckpointRow.model_id == ModelRow.model_id)
            .where(CheckpointRow.tenant == tenant, _is_kept())
            .group_by(SessionRow.project_id)
            .order_by(SessionRow.project_id)
        )
        if project_id is not None:
            query = query.where(SessionRow.project_id == project_id)
        with self._database.read() as session:
            return [(project, count, int(size)) for project, count, size in session.execute(query)]

    def stored_bytes(self, tenant: str) -> int:
        """What the snapshots of the tenant's policies take."""
        mine = select(PolicyRow.policy_id).where(PolicyRow.tenant == tenant)
        checkpoint = case((VersionRow.checkpoint_uri.is_not(None), VersionRow.checkpoint_size), else_=0)
        with self._database.read() as session:
            query = select(func.sum(VersionRow.sampler_size + func.coalesce(checkpoint, 0)))
            return int(session.scalar(query.where(VersionRow.policy_id.in_(mine))) or 0)


class ResultRecords(RecordScope):
    """The results of futures, of all tenants."""

    def keep_results(self, results: Collection[tuple[str, str, str, StoredResult]]) -> None:
        """Keep (tenant, request id, digest, result) of several futures, in one commit."""
        with self._database.write("") as session:
            known = select(FutureRow.request_id).where(FutureRow.request_id.in_([one[1] for one in results]))
            there = set(session.scalars(known))
            rows = [
                {
                    "request_id": request_id,
                    "tenant": tenant,
                    "session_id": request_id.partition(":")[0],
                    "digest": digest,
                    "media_type": result.media_type,
                    "body": result.body,
                    "created_at": utc_now(),
                }
                for tenant, request_id, digest, result in results
                if request_id not in there
            ]
            if rows:
                session.execute(insert(FutureRow), rows)

    def result(self, tenant: str, request_id: str) -> tuple[str, StoredResult] | None:
        """The digest of a submission and its result, if it is kept."""
        with self._database.read() as session:
            row = session.get(FutureRow, request_id) if ID.match(request_id) else None
            if row is None or row.tenant != tenant:
                return None
            return row.digest, StoredResult(row.body, row.media_type)

    def forget_results(self, *, before: datetime | None = None, session_id: str | None = None) -> None:
        """Forget results that are old, or those of a session."""
        with self._database.write("") as session:
            if before is not None:
                session.execute(delete(FutureRow).where(FutureRow.created_at < before))
            if session_id is not None:
                session.execute(delete(FutureRow).where(FutureRow.session_id == session_id))


def _named(
    session: Session, tenant: str, model_id: str, kind: CheckpointKind, name: str
) -> CheckpointRow | None:
    if not ID.match(model_id) or not ID.match(name):
        return None
    query = select(CheckpointRow).filter_by(tenant=tenant, model_id=model_id, kind=kind.value, name=name)
    return session.scalars(query).one_or_none()


def _is_over(row: CheckpointRow) -> bool:
    return row.expires_at is not None and row.expires_at <= utc_now()


def _is_kept() -> ColumnElement[bool]:
    return CheckpointRow.expires_at.is_(None) | (CheckpointRow.expires_at > utc_now())


def _taken(kind: CheckpointKind, name: str) -> UsageError:
    return UsageError(f"path: {kind}/{name} exists already; accepted: another name, or overwrite=True")
