"""Records of clients: their sessions, models and samplers."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import delete, exists, func, select, update

from opentinker_core.errors import UsageError
from opentinker_core.service.record_scope import RecordScope, owned, page
from opentinker_core.service.tables import ModelRow, SamplerRow, SessionRow, UsageRow
from opentinker_core.service.types import Model, ModelStatus, SamplerHandle, ServiceSession, SessionStatus

_FORGOTTEN_AT_ONCE = 5000
"""Others write in between."""


class SessionRecords(RecordScope):
    """The sessions of all tenants."""

    def add_session(
        self,
        tenant: str,
        session_id: str,
        *,
        tags: Sequence[str] = (),
        user_metadata: Mapping[str, Any] | None = None,
        sdk_version: str = "",
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> ServiceSession:
        """Record a new session."""
        with self._database.write(tenant) as session:
            row = SessionRow(
                session_id=session_id,
                tenant=tenant,
                server=self._server,
                tags=list(tags),
                user_metadata=dict(user_metadata or {}),
                sdk_version=sdk_version,
                project_id=project_id,
                display_name=display_name,
                status=SessionStatus.LIVE.value,
            )
            session.add(row)
            session.flush()
            return row.value()

    def session(self, tenant: str, session_id: str) -> ServiceSession:
        """The session with this id."""
        with self._database.read() as session:
            return owned(session, SessionRow, tenant, "session_id", session_id).value()

    def sessions(self, tenant: str, limit: int, offset: int) -> tuple[list[ServiceSession], int]:
        """The newest first, and how many there are."""
        with self._database.read() as session:
            rows, total = page(session, SessionRow, tenant, limit, offset)
            return [row.value() for row in rows], total

    def sessions_of(self, tenant: str, session_ids: Collection[str]) -> dict[str, ServiceSession]:
        """Those of the tenant with these ids."""
        with self._database.read() as session:
            mine = SessionRow.session_id.in_(session_ids)
            rows = session.scalars(select(SessionRow).where(SessionRow.tenant == tenant, mine))
            return {row.session_id: row.value() for row in rows}

    def has_session(self, tenant: str, session_id: str) -> bool:
        """Whether there is a session of this id."""
        with self._database.read() as session:
            row = session.get(SessionRow, session_id)
            return row is not None and row.tenant == tenant

    def set_project(self, tenant: str, session_id: str, project_id: str) -> None:
        """Note the project that a session is of."""
        with self._database.write(tenant) as session:
            owned(session, SessionRow, tenant, "session_id", session_id).project_id = project_id

    def live_sessions(self) -> list[ServiceSession]:
        """Those of all tenants that were begun here and have not ended: for the sweep alone."""
        with self._database.read() as session:
            query = select(SessionRow).filter_by(status=SessionStatus.LIVE.value, server=self._server)
            return [row.value() for row in session.scalars(query)]

    def sessions_before(
        self, tenant: str, last: tuple[datetime, str] | None, limit: int
    ) -> list[ServiceSession]:
        """The newest first, of those that are older than `last` (time and id)."""
        with self._database.read() as session:
            query = select(SessionRow).where(SessionRow.tenant == tenant)
            if last is not None:
                same = (SessionRow.created_at == last[0]) & (SessionRow.session_id < last[1])
                query = query.where((SessionRow.created_at < last[0]) | same)
            query = query.order_by(SessionRow.created_at.desc(), SessionRow.session_id.desc())
            return [row.value() for row in session.scalars(query.limit(limit))]

    def note_seen(self, seen: Mapping[str, datetime]) -> None:
        """Note when sessions were last heard of: for the sweep alone."""
        if not seen:
            return
        with self._database.write("") as session:
            for session_id, at in seen.items():
                session.execute(
                    update(SessionRow).where(SessionRow.session_id == session_id).values(seen_at=at)
                )

    def forget_sessions(self, before: datetime) -> int:
        """Forget those that ended, were last heard of before and left nothing: no models, no usage.

        Gives how many.
        """
        with self._database.write("") as session:
            old = select(SessionRow.session_id).where(
                SessionRow.status != SessionStatus.LIVE.value,
                SessionRow.seen_at < before,
                ~exists().where(ModelRow.session_id == SessionRow.session_id),
                SessionRow.session_id.not_in(select(UsageRow.session_id)),
            )
            gone = session.scalars(old.limit(_FORGOTTEN_AT_ONCE)).all()
            session.execute(delete(SamplerRow).where(SamplerRow.session_id.in_(gone)))
            session.execute(delete(SessionRow).where(SessionRow.session_id.in_(gone)))
            return len(gone)

    def end_session(
        self, tenant: str, session_id: str, status: SessionStatus, detail: str | None = None
    ) -> None:
        """Note that a session ended and that its models are released."""
        with self._database.write(tenant) as session:
            row = owned(session, SessionRow, tenant, "session_id", session_id)
            if row.status == SessionStatus.LIVE.value:
                row.status, row.detail = status.value, detail
            live = (ModelRow.session_id == session_id) & (ModelRow.status == ModelStatus.LIVE.value)
            session.execute(update(ModelRow).where(live).values(status=ModelStatus.RELEASED.value))


class ModelRecords(RecordScope):
    """The models and samplers of all tenants."""

    def add_model(
        self,
        tenant: str,
        model_id: str,
        session_id: str,
        *,
        policy_id: str,
        run_id: str,
        base_model: str,
        lora: Mapping[str, Any],
        user_metadata: Mapping[str, Any],
        digest: str,
    ) -> Model:
        """Record a model of a live session.

        Raises:
            NotFoundError: there is no such session.
            UsageError: the session has ended, or there is a model of this id.
        """
        with self._database.write(tenant) as session:
            owner = owned(session, SessionRow, tenant, "session_id", session_id)
            if owner.status != SessionStatus.LIVE.value:
                raise UsageError(
                    f"session_id: {session_id} is {owner.status}; accepted: a session that is live"
                )
            if session.get(ModelRow, model_id) is not None:
                raise UsageError(f"model_seq_id: {model_id} exists already; accepted: a new model_seq_id")
            row = ModelRow(
                model_id=model_id,
                tenant=tenant,
                session_id=session_id,
                policy_id=policy_id,
                run_id=run_id,
                base_model=base_model,
                lora=dict(lora),
                user_metadata=dict(user_metadata),
                digest=digest,
                status=ModelStatus.LIVE.value,
            )
            session.add(row)
            session.flush()
            return row.value()

    def model(self, tenant: str, model_id: str) -> Model:
        """The model with this id, whatever its status."""
        with self._database.read() as session:
            return owned(session, ModelRow, tenant, "model_id", model_id).value()

    def models(
        self,
        tenant: str,
        limit: int | None,
        offset: int = 0,
        session_id: str | None = None,
        project_id: str | None = None,
    ) -> tuple[list[Model], int]:
        """The newest first, of one session or project or of all, and how many there are."""
        with self._database.read() as session:
            where: list[Any] = [] if session_id is None else [ModelRow.session_id == session_id]
            if project_id is not None:
                mine = select(SessionRow.session_id).filter_by(tenant=tenant, project_id=project_id)
                where.append(ModelRow.session_id.in_(mine))
            rows, total = page(session, ModelRow, tenant, limit, offset, *where)
            return [row.value() for row in rows], total

    def set_run(self, tenant: str, model_id: str, run_id: str) -> None:
        """Note that a model goes on under another run, because other weights were loaded into it."""
        with self._database.write(tenant) as session:
            owned(session, ModelRow, tenant, "model_id", model_id).run_id = run_id

    def set_model_status(self, tenant: str, model_id: str, status: ModelStatus) -> None:
        """Note what became of a model."""
        with self._database.write(tenant) as session:
            owned(session, ModelRow, tenant, "model_id", model_id).status = status.value

    def note_used(self, used: Mapping[str, datetime]) -> None:
        """Note when models were last asked for something: for the sweep alone."""
        if not used:
            return
        with self._database.write("") as session:
            for model_id, at in used.items():
                session.execute(update(ModelRow).where(ModelRow.model_id == model_id).values(used_at=at))

    def mark_lost(self) -> list[Model]:
        """Note, when the server starts, that it has no state of a live model any more; gives these."""
        with self._database.write("") as session:
            ours = select(SessionRow.session_id).filter_by(server=self._server)
            live = select(ModelRow).where(
                ModelRow.status == ModelStatus.LIVE.value, ModelRow.session_id.in_(ours)
            )
            rows = session.scalars(live).all()
            for row in rows:
                row.status = ModelStatus.LOST.value
            return [row.value() for row in rows]

    def add_sampler(
        self,
        tenant: str,
        sampler_id: str,
        session_id: str,
        *,
        base_model: str,
        model_path: str | None = None,
        version: tuple[str, int] | None = None,
        inflight_of: str | None = None,
    ) -> SamplerHandle:
        """Record a sampler of a live session, once: repeated with the same content it is as it was.

        Args:
            version: policy id and number; None: the base model.
            inflight_of: the model whose samplers all move to `version` with this one, unless they are at a
                newer one, which this one then begins with.

        Raises:
            NotFoundError: there is no such session.
            UsageError: the session has ended, or there is another sampler of this id.
        """
        policy_id, number = version or (None, None)
        with self._database.write(tenant) as session:
            owner = owned(session, SessionRow, tenant, "session_id", session_id)
            row = session.get(SamplerRow, sampler_id)
            if row is not None:
                same = (row.base_model, row.model_path, row.inflight_of, row.policy_id)
                moves = inflight_of is not None
                if same != (base_model, model_path, inflight_of, policy_id) or (
                    row.number != number and not moves
                ):
                    raise UsageError(
                        f"sampling_session_seq_id: {sampler_id} exists with other content; accepted: a new id"
                    )
                return row.value()
            if owner.status != SessionStatus.LIVE.value:
                raise UsageError(
                    f"session_id: {session_id} is {owner.status}; accepted: a session that is live"
                )
            row = SamplerRow(
                sampler_id=sampler_id,
                tenant=tenant,
                session_id=session_id,
                base_model=base_model,
                model_path=model_path,
                policy_id=policy_id,
                number=number,
                inflight_of=inflight_of,
            )
            session.add(row)
            session.flush()
            if inflight_of is not None:
                mine = (SamplerRow.tenant == tenant) & (SamplerRow.inflight_of == inflight_of)
                newest = session.scalar(select(func.max(SamplerRow.number)).where(mine))
                session.execute(update(SamplerRow).where(mine).values(number=newest))
                session.refresh(row)
            return row.value()

    def sampler(self, tenant: str, sampler_id: str) -> SamplerHandle:
        """The sampler with this id; it outlives a restart, but not its session."""
        with self._database.read() as session:
            return owned(session, SamplerRow, tenant, "sampler_id", sampler_id).value()

    def samplers(self, tenant: str, session_id: str) -> list[SamplerHandle]:
        """Those of a session."""
        with self._database.read() as session:
            query = select(SamplerRow).where(SamplerRow.tenant == tenant, SamplerRow.session_id == session_id)
            return [row.value() for row in session.scalars(query.order_by(SamplerRow.created_at))]
