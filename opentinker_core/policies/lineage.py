"""What trained a version, what it generated, and how it was evaluated: for many versions at once."""

from collections.abc import Iterable, Sequence

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from opentinker_core.policies.refs import Ref, parse_ref
from opentinker_core.policies.scope import TenantScope
from opentinker_core.policies.tables import (
    EvaluationRow,
    PolicyRow,
    TrainedOnRow,
    TrajectorySetRow,
    VersionRow,
)
from opentinker_core.policies.types import Evaluation, TrajectorySet, VersionLineage

_Key = tuple[str, int]
"""Policy id and number of a version."""


class LineageRecords(TenantScope):
    """The edges between versions, trajectory sets and evaluations, as seen from versions."""

    def lineages(self, refs: Sequence[str]) -> list[VersionLineage]:
        """The lineage of each version `name@number`, in the order asked, in a fixed number of queries.

        Raises:
            UsageError: a reference is not `name@number`.
            NotFoundError: one of the versions does not exist.
        """
        with self._read() as session:
            rows = self._versions(session, refs)
            keys = [(row.policy_id, row.number) for row in rows]
            trained_on = _trained_on(session, keys)
            generated = _generated(session, keys)
            consumers = _consumers(session, [*trained_on.values(), *generated.values()])
            evaluations = self._evaluations_of(session, refs)
            return [
                VersionLineage(
                    version=row.value(),
                    trained_on=_values(trained_on.get(key, [])),
                    generated=_values(generated.get(key, [])),
                    consumers={
                        one.set_id: consumers.get(one.id, [])
                        for one in [*trained_on.get(key, []), *generated.get(key, [])]
                    },
                    evaluations=evaluations.get(row.ref, []),
                )
                for row, key in zip(rows, keys, strict=True)
            ]

    def trained_on_by_version(self, policy_name: str) -> dict[str, list[TrajectorySet]]:
        """`trained_on` of every version of a policy that has any, by `name@number`, in one query.

        Raises:
            NotFoundError: there is no such policy.
        """
        with self._read() as session:
            policy = self._policy(session, policy_name)
            query = (
                select(TrainedOnRow.number, TrajectorySetRow)
                .join(TrajectorySetRow, TrainedOnRow.trajectory_set == TrajectorySetRow.id)
                .where(TrainedOnRow.policy_id == policy.policy_id)
                .order_by(TrajectorySetRow.id)
            )
            found: dict[str, list[TrajectorySet]] = {}
            for number, row in session.execute(query):
                found.setdefault(str(Ref(policy.name, number)), []).append(row.value())
            return found

    def _versions(self, session: Session, refs: Sequence[str]) -> list[VersionRow]:
        parsed = [parse_ref(ref) for ref in refs]
        wanted = [(one.policy, one.version) for one in parsed if isinstance(one.version, int)]
        query = (
            select(VersionRow)
            .join(PolicyRow, PolicyRow.policy_id == VersionRow.policy_id)
            .where(PolicyRow.tenant == self.tenant, tuple_(PolicyRow.name, VersionRow.number).in_(wanted))
        )
        found = {row.ref: row for row in session.scalars(query)}
        return [found.get(ref) or self._numbered(session, "version", ref) for ref in refs]

    def _evaluations_of(self, session: Session, refs: Sequence[str]) -> dict[str, list[Evaluation]]:
        query = (
            select(EvaluationRow)
            .where(EvaluationRow.tenant == self.tenant, EvaluationRow.subject.in_(refs))
            .order_by(EvaluationRow.id)
        )
        found: dict[str, list[Evaluation]] = {}
        for row in session.scalars(query):
            found.setdefault(row.subject, []).append(row.value())
        return found


def _trained_on(session: Session, keys: Sequence[_Key]) -> dict[_Key, list[TrajectorySetRow]]:
    query = (
        select(TrainedOnRow.policy_id, TrainedOnRow.number, TrajectorySetRow)
        .join(TrajectorySetRow, TrainedOnRow.trajectory_set == TrajectorySetRow.id)
        .where(tuple_(TrainedOnRow.policy_id, TrainedOnRow.number).in_(keys))
        .order_by(TrajectorySetRow.id)
    )
    found: dict[_Key, list[TrajectorySetRow]] = {}
    for policy_id, number, row in session.execute(query):
        found.setdefault((policy_id, number), []).append(row)
    return found


def _generated(session: Session, keys: Sequence[_Key]) -> dict[_Key, list[TrajectorySetRow]]:
    sampled_by = tuple_(TrajectorySetRow.sampled_policy_id, TrajectorySetRow.sampled_number)
    query = select(TrajectorySetRow).where(sampled_by.in_(keys)).order_by(TrajectorySetRow.id)
    found: dict[_Key, list[TrajectorySetRow]] = {}
    for row in session.scalars(query):
        found.setdefault((row.sampled_policy_id or "", row.sampled_number or 0), []).append(row)
    return found


def _consumers(session: Session, sets: Iterable[list[TrajectorySetRow]]) -> dict[int, list[str]]:
    """`name@number` of the versions trained on each set (by primary key), oldest first."""
    version = (TrainedOnRow.policy_id == VersionRow.policy_id) & (TrainedOnRow.number == VersionRow.number)
    query = (
        select(TrainedOnRow.trajectory_set, PolicyRow.name, VersionRow.number)
        .join(VersionRow, version)
        .join(PolicyRow, PolicyRow.policy_id == VersionRow.policy_id)
        .where(TrainedOnRow.trajectory_set.in_({row.id for rows in sets for row in rows}))
        .order_by(VersionRow.created_at, VersionRow.number)
    )
    found: dict[int, list[str]] = {}
    for key, name, number in session.execute(query):
        found.setdefault(key, []).append(str(Ref(name, number)))
    return found


def _values(rows: Iterable[TrajectorySetRow]) -> list[TrajectorySet]:
    return [row.value() for row in rows]
