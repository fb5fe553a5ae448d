"""Versions in the catalog: numbers, publication with lineage, aliases, rollback, forks, pruning."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from sqlalchemy import Select, bindparam, exists, select
from sqlalchemy.orm import Session, aliased

from opentinker_core.errors import NotFoundError, UsageError
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
            self._check_run(session, run_id)
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
            if _published(session, policy, number, run_id, step):
                row = session.get_one(VersionRow, (policy_id, number))
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
            for set_id in self._sets(session, trained_on):
                session.add(TrainedOnRow(policy_id=policy_id, number=number, trajectory_set=set_id))
            return row.value()

    def add_checkpoint(self, policy_id: str, number: int, checkpoint: Snapshot) -> PolicyVersion:
        """Record the checkpoint of a version that was published without one, or whose own was forgotten.

        Raises:
            NotFoundError: there is no such version.
            SnapshotConflictError: it has, or had, another.
        """
        with self._write() as session:
            row = self._version_of(session, policy_id, number)
            if row.checkpoint_digest not in (None, checkpoint.digest):
                raise SnapshotConflictError(f"{row.ref} has another checkpoint already")
            row.checkpoint_uri, row.checkpoint_digest = checkpoint.uri, checkpoint.digest
            row.checkpoint_size = checkpoint.size
            session.flush()
            return row.value()

    def forget_checkpoint(self, policy_id: str, number: int) -> Snapshot | None:
        """Forget the checkpoint of a version.

        Returns:
            What is to be deleted, after this took effect; None: it has none, or another version has the same.

        Raises:
            NotFoundError: there is no such version.
        """
        with self._write() as session:
            row = self._version_of(session, policy_id, number)
            forgotten, row.checkpoint_uri = row.checkpoint, None
            if forgotten is None:
                return None
            session.flush()
            others = exists().where(VersionRow.checkpoint_uri == forgotten.uri)
            return None if session.scalar(select(others)) else forgotten

    def forget_sampler(self, policy_id: str, number: int) -> Snapshot | None:
        """Give up the sampler snapshot of a version that nobody samples from any more.

        The version stays, with its digest and a size of 0: sampling from it says that the snapshot is gone.

        Returns:
            What is to be deleted, after this took effect; None: an alias refers to the version, it has a
            checkpoint, or another version has the same snapshot.

        Raises:
            NotFoundError: there is no such version.
        """
        with self._write() as session:
            row = self._version_of(session, policy_id, number)
            named = exists().where(AliasRow.policy_id == policy_id, AliasRow.number == number)
            other = aliased(VersionRow)
            itself = (other.policy_id == policy_id) & (other.number == number)
            shared = exists().where(other.sampler_uri == row.sampler_uri, ~itself)
            if row.checkpoint is not None or session.scalar(select(named | shared)):
                return None
            forgotten, row.sampler_size = row.value().sampler, 0
            return forgotten

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

    def prune_checkpoints(self, run_id: str, keep: int, needed: int | None = None) -> list[Snapshot]:
        """Forget the checkpoints of a run that nobody needs; the newest `keep` are kept.

        Needed are those of the version of step `needed`, if it is given, those of a version with an alias,
        and those that another version (a fork) shares.

        Returns:
            What was forgotten, oldest first. Delete the files after this took effect: a crash in between
            leaves a file too many, not a version without its file.

        Raises:
            UsageError: `keep` is not positive.
            NotFoundError: there is no such run.
        """
        if keep < 1:
            raise UsageError(f"keep: {keep}; accepted: 1 or more")
        with self._write() as session:
            self._check_run(session, run_id)
            rows = session.scalars(_prunable(keep, needed), {"run_id": run_id}).all()
            forgotten = [row.checkpoint for row in rows if row.checkpoint is not None]
            for row in rows:
                row.checkpoint_uri = None
            return forgotten

    def _version_of(self, session: Session, policy_id: str, number: int) -> VersionRow:
        self._policy_of(session, policy_id)
        row = session.get(VersionRow, (policy_id, number))
        if row is None:
            raise NotFoundError(f"version: there is no {number} of the policy {policy_id!r:.80}")
        return row

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
        _point(session, row, aliases, forward=True)
        self._emit(session, VERSION_PUBLISHED, {"run_id": row.run_id, "version": row.ref})

    def _set_aliases(self, policy_name: str, aliases: Iterable[str], number: int) -> PolicyVersion:
        with self._write() as session:
            row = self._version(session, str(Ref(check_name("policy", policy_name), number)))
            _point(session, row, aliases)
            return row.value()

    def _sets(self, session: Session, set_ids: Sequence[str]) -> list[int]:
        """The primary keys of trajectory sets."""
        wanted = set(set_ids)
        query = select(TrajectorySetRow.set_id, TrajectorySetRow.id).where(
            TrajectorySetRow.tenant == self.tenant, TrajectorySetRow.set_id.in_(wanted)
        )
        found = dict(session.execute(query).tuples().all()) if wanted else {}
        if missing := wanted - found.keys():
            raise NotFoundError(f"trained_on: there is no trajectory set {', '.join(sorted(missing))}")
        return sorted(found.values())


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


def _point(session: Session, row: VersionRow, aliases: Iterable[str], *, forward: bool = False) -> None:
    """Let `aliases` refer to `row`; with `forward`, only those that do not refer to a later version."""
    wanted = list(aliases)
    query = select(AliasRow).where(AliasRow.policy_id == row.policy_id, AliasRow.alias.in_(wanted))
    known = {one.alias: one for one in session.scalars(query)}
    for alias in wanted:
        if alias not in known:
            session.add(AliasRow(policy_id=row.policy_id, alias=alias, number=row.number))
        elif not forward or known[alias].number < row.number:
            known[alias].number = row.number


def _published(session: Session, policy: PolicyRow, number: int, run_id: str, step: int) -> bool:
    """Whether there is a version under a number that is reserved for this run and step.

    Raises:
        UsageError: it is not.
    """
    version = (VersionRow.policy_id == NumberRow.policy_id) & (VersionRow.number == NumberRow.number)
    query = (
        select(NumberRow.run_id, NumberRow.step, VersionRow.number)
        .outerjoin(VersionRow, version)
        .where(NumberRow.policy_id == policy.policy_id, NumberRow.number == number)
    )
    reserved = session.execute(query).one_or_none()
    if reserved is None or tuple(reserved[:2]) != (run_id, step):
        raise UsageError(
            f"version: {Ref(policy.name, number)} is not reserved for step {step} of run {run_id!r:.80}"
        )
    return reserved[2] is not None


def _check_same(row: VersionRow, sampler: Snapshot, checkpoint: Snapshot | None) -> None:
    digests = (sampler.digest, checkpoint.digest if checkpoint else None)
    if (row.sampler_digest, row.checkpoint_digest) != digests:
        raise SnapshotConflictError(f"{row.ref} is published already, with other content")


@cache
def _prunable(keep: int, needed: int | None) -> Select[VersionRow]:
    """The versions of the run `:run_id` whose checkpoint is neither among its newest `keep` nor needed."""
    has_checkpoint = (VersionRow.run_id == bindparam("run_id"), VersionRow.checkpoint_uri.is_not(None))
    newest = select(VersionRow.number).where(*has_checkpoint).order_by(VersionRow.number.desc())
    oldest_kept = newest.offset(keep - 1).limit(1).scalar_subquery()
    named = exists().where(AliasRow.policy_id == VersionRow.policy_id, AliasRow.number == VersionRow.number)
    other = aliased(VersionRow)
    itself = (other.policy_id == VersionRow.policy_id) & (other.number == VersionRow.number)
    shared = exists().where(other.checkpoint_uri == VersionRow.checkpoint_uri, ~itself)
    query = select(VersionRow).where(*has_checkpoint, VersionRow.number < oldest_kept, ~named, ~shared)
    if needed is not None:
        query = query.where(VersionRow.step != needed)
    return query.order_by(VersionRow.number)
