"""Trajectory sets and evaluations in the catalog."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import and_, select
from sqlalchemy.orm import Session

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.policies.outbox import EVALUATION_RECORDED
from opentinker_core.policies.refs import BASE, RESERVED
from opentinker_core.policies.scope import TenantScope, check_finite, check_json
from opentinker_core.policies.tables import EvaluationRow, TrajectorySetRow
from opentinker_core.policies.types import Evaluation, TrajectorySet


class TrajectorySetRecords(TenantScope):
    """What was sampled, and what evaluations found."""

    def add_trajectory_set(self, trajectory_set: TrajectorySet) -> TrajectorySet:
        """Record a stored set. One of the same run, step, purpose and sampler is returned instead.

        Raises:
            UsageError: `sampled_by` is neither `name@number`, `base` nor `demonstration`; or the id is
                taken by a set of another run, step, purpose or sampler.
            NotFoundError: the sampling version or the run does not exist.
            OpenTinkerError: that run's step has a set with other content.
        """
        with self._write() as session:
            return self._add_set(session, trajectory_set).value()

    def trajectory_sets(self, run_id: str, purpose: str | None = None) -> list[TrajectorySet]:
        """The sets of a run (of a purpose), by step.

        Raises:
            NotFoundError: there is no such run.
        """
        query = select(TrajectorySetRow).filter_by(run_id=run_id)
        if purpose is not None:
            query = query.filter_by(purpose=purpose)
        with self._read() as session:
            self._check_run(session, run_id)
            rows = session.scalars(query.order_by(TrajectorySetRow.step, TrajectorySetRow.id))
            return [row.value() for row in rows]

    def add_evaluation(self, evaluation: Evaluation) -> Evaluation:
        """Record an evaluation with its trajectory set, and emit the event.

        A run's evaluation of the same subject in the same environment is returned instead.

        Raises:
            UsageError: `subject` is neither `name@number` nor `base`, or a number is not finite.
            NotFoundError: the subject or the run does not exist.
        """
        check_json("evaluation details", evaluation.details)
        with self._write() as session:
            row = self._find_evaluation(session, evaluation)
            if row is None:
                row = self._insert_evaluation(session, evaluation)
                payload = {"run_id": evaluation.run_id, "subject": evaluation.subject}
                self._emit(session, EVALUATION_RECORDED, payload)
            return row.value()

    def evaluations(self, run_id: str | None = None, subject: str | None = None) -> list[Evaluation]:
        """Evaluations (of a run, of a subject), oldest first."""
        query = select(EvaluationRow).filter_by(tenant=self.tenant)
        if run_id is not None:
            query = query.filter_by(run_id=run_id)
        if subject is not None:
            query = query.filter_by(subject=subject)
        with self._read() as session:
            return [row.value() for row in session.scalars(query.order_by(EvaluationRow.id))]

    def _add_set(self, session: Session, new: TrajectorySet) -> TrajectorySetRow:
        run_id = new.run_id or None
        if run_id is not None:
            self._check_run(session, run_id)
        place = {"step": new.step, "purpose": new.purpose, "sampled_by": new.sampled_by, "run_id": run_id}
        row = self._find_set(session, new.set_id, place if run_id is not None else None)
        if row is None:
            return self._insert_set(session, new, run_id)
        where = f"{row.purpose} set of step {row.step} of run {row.run_id} sampled by {row.sampled_by}"
        if any(getattr(row, name) != value for name, value in place.items()):
            raise UsageError(f"trajectory set: the id {new.set_id!r:.80} is that of the {where}")
        if row.digest != new.digest:
            raise OpenTinkerError(f"trajectory set: the {where} is recorded already, with other content")
        return row

    def _insert_set(self, session: Session, new: TrajectorySet, run_id: str | None) -> TrajectorySetRow:
        by = None
        if new.sampled_by not in RESERVED:
            by = self._numbered(session, "sampled_by", new.sampled_by)
        mean = None if new.reward_mean is None else check_finite("reward_mean", new.reward_mean)
        row = TrajectorySetRow(
            tenant=self.tenant,
            set_id=new.set_id,
            uri=new.uri,
            digest=new.digest,
            episodes=new.episodes,
            tokens=new.tokens,
            environment=new.environment,
            sampled_by=new.sampled_by,
            sampled_policy_id=by.policy_id if by else None,
            sampled_number=by.number if by else None,
            run_id=run_id,
            step=new.step,
            purpose=new.purpose,
            reward_mean=mean,
            **({"created_at": new.created_at} if new.created_at else {}),
        )
        session.add(row)
        session.flush()
        return row

    def _find_set(
        self, session: Session, set_id: str, place: Mapping[str, Any] | None = None
    ) -> TrajectorySetRow | None:
        """The set of this id, else the one at `place` (values of the columns that make it unique)."""
        matches = (TrajectorySetRow.tenant == self.tenant) & (TrajectorySetRow.set_id == set_id)
        if place is not None:
            matches |= and_(*(getattr(TrajectorySetRow, name) == value for name, value in place.items()))
        found = session.scalars(select(TrajectorySetRow).where(matches)).all()
        return next((row for row in found if row.set_id == set_id), found[0] if found else None)

    def _find_evaluation(self, session: Session, evaluation: Evaluation) -> EvaluationRow | None:
        if evaluation.run_id is None:
            return None
        self._check_run(session, evaluation.run_id)
        query = select(EvaluationRow).filter_by(
            run_id=evaluation.run_id, subject=evaluation.subject, environment=evaluation.environment
        )
        return session.scalars(query).one_or_none()

    def _insert_evaluation(self, session: Session, new: Evaluation) -> EvaluationRow:
        subject = None if new.subject == BASE else self._numbered(session, "subject", new.subject)
        trajectories = self._add_set(session, new.trajectory_set) if new.trajectory_set else None
        row = EvaluationRow(
            tenant=self.tenant,
            subject=new.subject,
            subject_policy_id=subject.policy_id if subject else None,
            subject_number=subject.number if subject else None,
            run_id=new.run_id,
            step=new.step,
            environment=new.environment,
            mean=check_finite("mean", new.mean),
            low=check_finite("low", new.low),
            high=check_finite("high", new.high),
            episodes=new.episodes,
            trajectory_set=trajectories.id if trajectories else None,
            details=new.details,
        )
        session.add(row)
        session.flush()
        return row
