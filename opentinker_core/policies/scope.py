"""What all parts of the catalog share: the database, the tenant, and finding a tenant's rows."""

import copy
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from sqlalchemy import select
from sqlalchemy.orm import Session

from opentinker_core.digests import canonical_json
from opentinker_core.errors import NotFoundError, UsageError
from opentinker_core.names import check_name
from opentinker_core.policies.database import Database
from opentinker_core.policies.refs import Ref, parse_ref
from opentinker_core.policies.tables import AliasRow, OutboxRow, PolicyRow, RunRow, VersionRow

_LISTED = 20


class TenantScope:
    """A database as one tenant sees it: other tenants' rows do not exist."""

    def __init__(self, url: str, tenant: str = "default") -> None:
        self.tenant = check_name("tenant", tenant)
        self.url = url
        self._database = Database(url)
        self._thread = threading.local()

    def seen_by(self, tenant: str) -> Self:
        """The same database as another tenant sees it, by the same connections: closed for one is for all.

        Raises:
            UsageError: the tenant's name is not accepted.
        """
        other = copy.copy(self)
        other.tenant = check_name("tenant", tenant)
        other._thread = threading.local()
        return other

    def close(self) -> None:
        """Close all connections."""
        self._database.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make one transaction of what this thread calls within: it takes effect at the end, or not at all.

        Every method is one by itself; several in one cost a single commit, which waits for the disk. Other
        writers wait for the end of the block. An error must leave it.
        """
        with self._write() as session:
            outer, self._thread.session = self._joined, session
            try:
                yield
            finally:
                self._thread.session = outer

    @property
    def _joined(self) -> Session | None:
        """The session of the `transaction` that this thread is in."""
        return getattr(self._thread, "session", None)

    @contextmanager
    def _read(self) -> Iterator[Session]:
        if (session := self._joined) is not None:
            yield session
            return
        with self._database.read() as session:
            yield session

    @contextmanager
    def _write(self) -> Iterator[Session]:
        if (session := self._joined) is not None:
            yield session
            return
        with self._database.write(self.tenant) as session:
            yield session

    def _find_policy(self, session: Session, name: str) -> PolicyRow | None:
        query = select(PolicyRow).where(PolicyRow.tenant == self.tenant, PolicyRow.name == name)
        return session.scalars(query).one_or_none()

    def _policy(self, session: Session, name: str) -> PolicyRow:
        row = self._find_policy(session, check_name("policy", name))
        if row is None:
            query = select(PolicyRow.name).where(PolicyRow.tenant == self.tenant).order_by(PolicyRow.name)
            names = session.scalars(query.limit(_LISTED + 1)).all()
            raise NotFoundError(f"policy: there is no {name!r}; {_existing(list(names))}")
        return row

    def _policy_of(self, session: Session, policy_id: str) -> PolicyRow:
        row = session.get(PolicyRow, policy_id)
        if row is None or row.tenant != self.tenant:
            raise NotFoundError(f"policy: there is none with the id {policy_id!r:.80}")
        return row

    def _version(self, session: Session, ref: str) -> VersionRow:
        wanted = parse_ref(ref)
        query = (
            select(VersionRow)
            .join(PolicyRow, PolicyRow.policy_id == VersionRow.policy_id)
            .where(PolicyRow.tenant == self.tenant, PolicyRow.name == wanted.policy)
        )
        if isinstance(wanted.version, int):
            query = query.where(VersionRow.number == wanted.version)
        else:
            at_alias = (AliasRow.policy_id == VersionRow.policy_id) & (AliasRow.number == VersionRow.number)
            query = query.join(AliasRow, at_alias).where(AliasRow.alias == wanted.version)
        row = session.scalars(query).one_or_none()
        if row is None:
            exists = self._what_exists(session, self._policy(session, wanted.policy))
            raise NotFoundError(f"version: there is no {wanted}; {exists}")
        return row

    def _numbered(self, session: Session, field: str, ref: str) -> VersionRow:
        """The version of a reference that is recorded, and so must not move like an alias."""
        if not isinstance(parse_ref(ref).version, int):
            raise UsageError(f"{field}: {ref!r:.100}; accepted: 'name@number'")
        return self._version(session, ref)

    def _run(self, session: Session, run_id: str) -> RunRow:
        row = session.get(RunRow, run_id)
        if row is None or row.tenant != self.tenant:
            raise _no_run(run_id)
        return row

    def _check_run(self, session: Session, run_id: str) -> None:
        """Raises NotFoundError as `_run` does, without reading the run's config."""
        if session.scalar(select(RunRow.tenant).where(RunRow.run_id == run_id)) != self.tenant:
            raise _no_run(run_id)

    def _emit(self, session: Session, kind: str, payload: dict[str, Any]) -> None:
        """Add an event to the outbox, in the transaction of what it tells."""
        session.add(OutboxRow(tenant=self.tenant, kind=kind, payload=payload))

    def _what_exists(self, session: Session, policy: PolicyRow) -> str:
        numbers = session.scalars(
            select(VersionRow.number)
            .where(VersionRow.policy_id == policy.policy_id)
            .order_by(VersionRow.number.desc())
            .limit(_LISTED + 1)
        ).all()
        aliases = session.scalars(
            select(AliasRow).where(AliasRow.policy_id == policy.policy_id).order_by(AliasRow.alias)
        ).all()
        refs = [str(Ref(policy.name, number)) for number in numbers]
        return _existing(refs + [f"{Ref(policy.name, row.alias)} (= {row.number})" for row in aliases])


def _no_run(run_id: str) -> NotFoundError:
    return NotFoundError(f"run: there is none with the id {run_id!r:.80}")


def _existing(names: list[str]) -> str:
    if not names:
        return "there is none yet"
    return "there is: " + ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")


def check_finite(field: str, value: float) -> float:
    """Return `value` as a float.

    Raises:
        UsageError: it is not a finite number.
    """
    number = float(value)
    if not math.isfinite(number):
        raise UsageError(f"{field}: {number}; accepted: a finite number")
    return number


def check_json(field: str, value: dict[str, Any]) -> dict[str, Any]:
    """Return `value` if it can be kept as JSON.

    Raises:
        UsageError: it holds something that JSON has no form for.
    """
    try:
        canonical_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{field}: cannot be kept as JSON: {error}") from error
    return value
