"""Runs in the catalog: what was started with which config, and how it ended."""

import secrets
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from opentinker_core.errors import NotFoundError, UsageError
from opentinker_core.names import check_name
from opentinker_core.policies.outbox import RUN_FINISHED, RUN_STARTED
from opentinker_core.policies.scope import TenantScope, check_json
from opentinker_core.policies.tables import RunRow, VersionRow, utc_now
from opentinker_core.policies.types import PolicyVersion, Run, RunStatus


class RunRecords(TenantScope):
    """The runs of a tenant."""

    def start_run(
        self,
        name: str,
        policy_id: str,
        config: dict[str, Any],
        config_digest: str,
        code_commit: str | None = None,
        flow_run_id: str | None = None,
    ) -> Run:
        """Record a new run of a policy, as running.

        A flow run has one run a policy: started again by the same flow run with the same config (a
        retry after a crash), the run that it started is returned.

        Raises:
            UsageError: `name` is not a name, or the flow run has started a run of another config.
            NotFoundError: there is no such policy.
        """
        check_name("run", name)
        check_json("config", config)
        with self._write() as session:
            self._policy_of(session, policy_id)
            row = self._run_of_flow(session, flow_run_id, RunRow.policy_id == policy_id)
            if row is None:
                row = RunRow(
                    run_id=secrets.token_hex(8),
                    tenant=self.tenant,
                    name=name,
                    policy_id=policy_id,
                    config=config,
                    config_digest=config_digest,
                    code_commit=code_commit,
                    status=RunStatus.RUNNING.value,
                    flow_run_id=flow_run_id,
                )
                session.add(row)
                session.flush()
                self._emit(session, RUN_STARTED, {"run_id": row.run_id, "status": row.status})
            elif row.config_digest != config_digest:
                raise UsageError(
                    f"flow run: {flow_run_id} has started the run {row.run_id} of another config"
                )
            return row.value()

    def run(self, key: str) -> Run:
        """The run with this id, else the newest of this name, else the only one whose id begins so.

        Raises:
            NotFoundError: there is none.
            UsageError: several ids begin so.
        """
        with self._read() as session:
            row = session.get(RunRow, key)
            if row is not None and row.tenant == self.tenant:
                return row.value()
            mine = select(RunRow).where(RunRow.tenant == self.tenant).order_by(RunRow.created_at.desc())
            named = session.scalars(mine.where(RunRow.name == key).limit(1)).first()
            if named is not None:
                return named.value()
            found = session.scalars(mine.where(RunRow.run_id.startswith(key, autoescape=True)).limit(2)).all()
            if len(found) > 1:
                raise UsageError(f"run: several ids begin with {key!r:.80}; give more of it")
            if not found:
                raise NotFoundError(
                    f"run: there is no {key!r:.80}; accepted: a run's id, the beginning of it, or its name"
                )
            return found[0].value()

    def run_of_flow(self, flow_run_id: str, name: str | None = None) -> Run | None:
        """The run that a Prefect flow run works on; `name`: of the run, where it may work on several."""
        with self._read() as session:
            named = () if name is None else (RunRow.name == name,)
            row = self._run_of_flow(session, flow_run_id, *named)
            return row.value() if row else None

    def joint_runs(self, key: str) -> list[Run]:
        """The runs of a joint run, one a policy, in the order in which they were started.

        `key`: its id, else the name of one, which means the newest of that name.
        """
        joint_id, name = (RunRow.config["joint"][field].as_string() for field in ("joint_id", "name"))
        mine = select(RunRow).where(RunRow.tenant == self.tenant)
        with self._read() as session:
            named = session.scalars(mine.where(name == key).order_by(RunRow.created_at.desc())).first()
            found = key if named is None else named.config["joint"]["joint_id"]
            query = mine.where(joint_id.in_([key, found])).order_by(RunRow.created_at, RunRow.run_id)
            return [row.value() for row in session.scalars(query)]

    def runs(self, limit: int = 50) -> list[Run]:
        """The newest runs first."""
        query = select(RunRow).where(RunRow.tenant == self.tenant).order_by(RunRow.created_at.desc())
        with self._read() as session:
            return [row.value() for row in session.scalars(query.limit(limit))]

    def update_run(
        self,
        run_id: str,
        *,
        status: RunStatus | None = None,
        flow_run_id: str | None = None,
        mlflow_run_id: str | None = None,
        error: str | None = None,
    ) -> Run:
        """Change what is given. A new status replaces the error too; None leaves a field as it is.

        Raises:
            NotFoundError: there is no such run.
            UsageError: the flow run works on another run.
        """
        with self._write() as session:
            row = self._run(session, run_id)
            other = self._run_of_flow(session, flow_run_id, RunRow.policy_id == row.policy_id)
            if other is not None and other is not row:
                raise UsageError(f"flow run: {flow_run_id} works on the run {other.run_id} already")
            row.flow_run_id = flow_run_id or row.flow_run_id
            row.mlflow_run_id = mlflow_run_id or row.mlflow_run_id
            row.error = error if status is not None else (error or row.error)
            if status is not None and status != row.status:
                row.status = status.value
                if status != RunStatus.RUNNING:
                    self._emit(session, RUN_FINISHED, {"run_id": run_id, "status": row.status})
            row.updated_at = utc_now()
            return row.value()

    def run_versions(self, run_id: str) -> list[PolicyVersion]:
        """The versions that a run published, by ascending number.

        Raises:
            NotFoundError: there is no such run.
        """
        with self._read() as session:
            self._check_run(session, run_id)
            query = select(VersionRow).where(VersionRow.run_id == run_id).order_by(VersionRow.number)
            return [row.value() for row in session.scalars(query)]

    def _run_of_flow(
        self, session: Session, flow_run_id: str | None, *which: ColumnElement[bool]
    ) -> RunRow | None:
        if flow_run_id is None:
            return None
        query = select(RunRow).where(RunRow.tenant == self.tenant, RunRow.flow_run_id == flow_run_id, *which)
        return session.scalars(query.order_by(RunRow.created_at, RunRow.run_id)).first()
