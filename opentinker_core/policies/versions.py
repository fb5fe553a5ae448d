"""Versions in the catalog: numbers, publication with lineage, aliases, rollback, forks, pruning."""

import secrets
from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session, aliased

from opentinker_core.errors import NotFoundError, OpenTinkerError, UsageError
from opentinker_core.names import check_name
from opentinker_core.policies.outbox import VERSION_PUBLISHED
from opentinker_core.policies.refs import LATEST, RESERVED, Ref, check_alias
from opentinker_core.policies.scope import TenantScope
from opentinker_core.policies.tables import (
    AliasRow,
    NumberRow,
    PolicyRow,
    TrainedOnRow,
    TrajectorySetRow,
    VersionRow,
)
from opentinker_core.policies.types import PolicyVersion
from opentinker_core.snapshots.protocol import Snapshot, SnapshotConflictError

ROLLOUT = "rollout"
BEST = "best"
PUBLISHED_ALIASES = (LATEST, ROLLOUT)


class VersionRecords(TenantScope):
    """The policy versions of a tenant."""

    def reserve_version(self, policy_id: str, run_id: str, step: int) -> int:
        """The number for what a run publishes after `step`: the policy's next, never given twice.

        The same run and step get the same number again, so that a killed publication can be repeated.

        Raises:
            NotFoundError: there is no such policy or run.
        """
        with self._write() as session:
            policy = self._policy_of(session, policy_id)
            self._run(session, run_id)
            query = select(NumberRow.number).filter_by(policy_id=policy_id, run_id=run_id, step=step)
            number = session.scalars(query).one_or_none()
            return self._next_number(session, policy, run_id, step) if number is None else number

    def publish_version(
        self,
        policy_id: str,
        number: int,
        *,
        sampler: Snapshot,
        checkpoint: Snapshot | None,
        parent: str | None,
        run_id: str,
        step: int,
        phase: str,
        metrics: Mapping[str, float],
        trained_on: Sequence[str] = (),
        aliases: Iterable[str] = PUBLISHED_ALIASES,
    ) -> PolicyVersion:
        """Record a version with its lineage, move its aliases and emit the event: all or nothing.

        `parent` is a `name@number` of this or another policy, or None on the base model;
        `trained_on` are ids of trajectory sets. Aliases only move forward here, so a late
        publication of an earlier number does not undo a later one. Repeated with the same
        digests, it returns the version as it stands and changes nothing.

        Raises:
            UsageError: `number` was not reserved for this run and step.
            NotFoundError: the policy, the parent, or a trajectory set does not exist.
            SnapshotConflictError: the number is published with other content.
        """
        aliases = [check_alias(alias) for alias in aliases]
        with self._write() as session:
            policy = self._policy_of(session, policy_id)
            _check_reserved(session, policy, number, run_id, step)
            row = session.get(VersionRow, (policy_id, number))
            if row is not None:
                _check_same(row, sampler, checkpoint)
                return row.value()
            row = VersionRow(
                policy_id=policy_id,
                number=number,
                run_id=run_id,
                step=step,
                phase=phase,
                metrics=dict(metrics),
            )
            source = self._numbered(session, "parent", parent) if parent is not None else None
            self._insert(session, row, sampler, checkpoint, source, aliases)
            for set_row in self._sets(session, trained_on):
                session.add(TrainedOnRow(policy_id=policy_id, number=number, trajectory_set=set_row.id))
            return row.value()

    def version(self, ref: str) -> PolicyVersion:
        """The version that `name` (its latest), `name@number` or `name@alias` refers to.

        Raises:
            UsageError: `ref` is not a reference.
            NotFoundError: it refers to nothing; the message lists what exists.
        """
        with self._read() as session:
            return self._version(session, ref).value()

    def versions(self, policy_name: str) -> list[PolicyVersion]:
        """All versions of a policy, by ascending number.

        Raises:
            NotFoundError: there is no such policy.
        """
        with self._read() as session:
            policy = self._policy(session, policy_name)
            query = select(VersionRow).filter_by(policy_id=policy.policy_id).order_by(VersionRow.number)
            return [row.value() for row in session.scalars(query)]

    def aliases(self, policy_name: str) -> dict[str, int]:
        """Alias → number.

        Raises:
            NotFoundError: there is no such policy.
        """
        with self._read() as session:
            policy = self._policy(session, policy_name)
            rows = session.scalars(
                select(AliasRow).filter_by(policy_id=policy.policy_id).order_by(AliasRow.alias)
            )
            return {row.alias: row.number for row in rows}

    def set_alias(self, policy_name: str, alias: str, number: int) -> PolicyVersion:
        """Let `alias` refer to a version, wherever it referred to before.

        Raises:
            UsageError: `alias` is not an alias.
            NotFoundError: there is no such version.
        """
        return self._set_aliases(policy_name, (check_alias(alias),), number)

    def rollback(self, policy_name: str, number: int) -> PolicyVersion:
        """Make an earlier version the one that is sampled and continued from: `latest` and `rollout`.

        Nothing is deleted, and the next version still gets a new number.

        Raises:
            NotFoundError: there is no such version.
        """
        return self._set_aliases(policy_name, PUBLISHED_ALIASES, number)

    def fork(self, ref: str, new_name: str) -> PolicyVersion:
        """Start a policy from a version of another: its version 0 has the same snapshots.

        Repeating it returns the same version.

        Raises:
            UsageError: there is another policy of this name.
            NotFoundError: `ref` refers to nothing.
        """
        check_policy_name(new_name)
        with self._write() as session:
            source = self._version(session, ref)
            policy = self._find_policy(session, new_name)
            if policy is not None:
                if policy.forked_from != source.ref:
                    raise UsageError(f"policy: {new_name!r} exists already and is no fork of {source.ref}")
                return self._version(session, str(Ref(new_name, 0))).value()
            policy = PolicyRow(
                policy_id=secrets.token_hex(8),
                tenant=self.tenant,
                name=new_name,
                base_model=source.policy.base_model,
                lora=source.policy.lora,
                forked_from=source.ref,
                next_number=0,
            )
            session.add(policy)
            number = self._next_number(session, policy, None, 0)
            row = VersionRow(policy_id=policy.policy_id, number=number, step=0, phase="init", metrics={})
            sampler = source.value().sampler
            self._insert(session, row, sampler, source.checkpoint, source, PUBLISHED_ALIASES)
            return row.value()

    def prunable_checkpoints(self, run_id: str, keep: int) -> list[PolicyVersion]:
        """Versions of a run whose checkpoints nobody needs, the newest `keep` of them kept.

        Needed are those of a version with an alias, and those that another version (a fork) shares.

        Raises:
            UsageError: `keep` is not positive.
            NotFoundError: there is no such run.
        """
        if keep < 1:
            raise UsageError(f"keep: {keep}; accepted: 1 or more")
        with self._read() as session:
            self._run(session, run_id)
            query = (
                select(VersionRow)
                .where(VersionRow.run_id == run_id, VersionRow.checkpoint_uri.is_not(None))
                .order_by(VersionRow.number.desc())
                .offset(keep)
            )
            rows = [row for row in session.scalars(query).all() if _need_of(session, row) is None]
            return [row.value() for row in reversed(rows)]

    def forget_checkpoint(self, version: PolicyVersion) -> PolicyVersion:
        """Record that a version's checkpoint is pruned; call it before its files are deleted.

        Raises:
            OpenTinkerError: an alias or another version needs it.
            NotFoundError: there is no such version.
        """
        with self._write() as session:
            row = self._version(session, version.ref)
            if row.checkpoint_uri is not None and (need := _need_of(session, row)) is not None:
                raise OpenTinkerError(f"checkpoint of {row.ref}: {need} needs it")
            row.checkpoint_uri = None
            return row.value()

    def _next_number(self, session: Session, policy: PolicyRow, run_id: str | None, step: int) -> int:
        number = policy.next_number
        policy.next_number += 1
        session.flush()
        session.add(NumberRow(policy_id=policy.policy_id, number=number, run_id=run_id, step=step))
        session.flush()
        return number

    def _insert(
        self,
        session: Session,
        row: VersionRow,
        sampler: Snapshot,
        checkpoint: Snapshot | None,
        parent: VersionRow | None,
        aliases: Iterable[str],
    ) -> None:
        row.sampler_uri, row.sampler_digest, row.sampler_size = sampler.uri, sampler.digest, sampler.size
        if checkpoint is not None:
            row.checkpoint_uri, row.checkpoint_digest = checkpoint.uri, checkpoint.digest
            row.checkpoint_size = checkpoint.size
        if parent is not None:
            row.parent_policy_id, row.parent_number = parent.policy_id, parent.number
        session.add(row)
        session.flush()
        for alias in aliases:
            current = session.get(AliasRow, (row.policy_id, alias))
            if current is None or current.number < row.number:
                _point(session, row, alias)
        self._emit(session, VERSION_PUBLISHED, {"run_id": row.run_id, "version": row.ref})

    def _set_aliases(self, policy_name: str, aliases: Iterable[str], number: int) -> PolicyVersion:
        with self._write() as session:
            row = self._version(session, str(Ref(check_name("policy", policy_name), number)))
            for alias in aliases:
                _point(session, row, alias)
            return row.value()

    def _sets(self, session: Session, set_ids: Sequence[str]) -> list[TrajectorySetRow]:
        wanted = list(dict.fromkeys(set_ids))
        rows = session.scalars(
            select(TrajectorySetRow).where(
                TrajectorySetRow.tenant == self.tenant, TrajectorySetRow.set_id.in_(wanted)
            )
        ).all()
        if missing := set(wanted) - {row.set_id for row in rows}:
            raise NotFoundError(f"trained_on: there is no trajectory set {', '.join(sorted(missing))}")
        return list(rows)


def check_policy_name(name: str) -> str:
    """Return `name` if a policy may have it.

    Raises:
        UsageError: it is not a safe name, or it stands for something else in references.
    """
    if check_name("policy", name) in RESERVED:
        raise UsageError(
            f"policy: {name!r} is reserved; accepted: any name but {', '.join(sorted(RESERVED))}"
        )
    return name


def _point(session: Session, row: VersionRow, alias: str) -> None:
    session.merge(AliasRow(policy_id=row.policy_id, alias=alias, number=row.number))


def _check_reserved(session: Session, policy: PolicyRow, number: int, run_id: str, step: int) -> None:
    reserved = session.get(NumberRow, (policy.policy_id, number))
    if reserved is None or (reserved.run_id, reserved.step) != (run_id, step):
        raise UsageError(
            f"version: {Ref(policy.name, number)} is not reserved for step {step} of run {run_id!r:.80}"
        )


def _check_same(row: VersionRow, sampler: Snapshot, checkpoint: Snapshot | None) -> None:
    digests = (sampler.digest, checkpoint.digest if checkpoint else None)
    if (row.sampler_digest, row.checkpoint_digest) != digests:
        raise SnapshotConflictError(f"{row.ref} is published already, with other content")


def _need_of(session: Session, row: VersionRow) -> str | None:
    """Who needs the checkpoint of a version, if anyone does."""
    alias = session.scalars(
        select(AliasRow.alias).filter_by(policy_id=row.policy_id, number=row.number).limit(1)
    ).first()
    if alias is not None:
        return f"the alias {alias!r}"
    other = aliased(VersionRow)
    same = (other.policy_id == row.policy_id) & (other.number == row.number)
    sharing = session.scalars(
        select(other).where(other.checkpoint_uri == row.checkpoint_uri, ~same).limit(1)
    ).first()
    return sharing.ref if sharing else None
