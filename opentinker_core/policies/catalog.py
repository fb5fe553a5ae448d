"""The catalog: the database of policies, versions, runs and lineage edges, and the durable truth of all.

    catalog = Catalog("sqlite:////home/me/.opentinker/catalog.db")
    catalog.version("adder@best").sampler.uri

Every method is one transaction (`transaction` joins several) and returns plain frozen objects
(`policies/types.py`). What it records of a run is idempotent, so that a killed run may repeat its
last action.
"""

import secrets
from dataclasses import dataclass

from sqlalchemy import func, select

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import UsageError
from opentinker_core.policies.lineage import LineageRecords
from opentinker_core.policies.outbox import Outbox
from opentinker_core.policies.runs import RunRecords
from opentinker_core.policies.tables import AliasRow, PolicyRow, VersionRow
from opentinker_core.policies.trajectory_sets import TrajectorySetRecords
from opentinker_core.policies.types import Policy
from opentinker_core.policies.versions import VersionRecords, check_policy_name


@dataclass(frozen=True)
class PolicySummary:
    """A policy with the number of its versions and where its aliases point."""

    policy: Policy
    versions: int
    aliases: dict[str, int]


class Catalog(VersionRecords, RunRecords, TrajectorySetRecords, LineageRecords, Outbox):
    """The catalog at a URL, as one tenant sees it. Safe to share between threads.

    `url` is a SQLAlchemy URL: `sqlite:///file` (created if missing) or `postgresql://...`. Opening it
    brings its schema up to date.

    Raises:
        UsageError: the URL or the tenant's name is not accepted.
        OpenTinkerError: the database cannot be opened, or is of a newer version of opentinker. Every
            method raises it when the database fails.
    """

    def create_policy(
        self, name: str, base_model: str, lora: LoRAConfig, forked_from: str | None = None
    ) -> Policy:
        """Record a policy; one with this name, base model and LoRA config is returned as it is.

        Raises:
            UsageError: the name is not accepted, or is that of a policy with another base model or
                LoRA config.
            NotFoundError: `forked_from`, a `name@number`, does not exist.
        """
        check_policy_name(name)
        adapter = lora.model_dump(mode="json")
        with self._write() as session:
            row = self._find_policy(session, name)
            if row is None:
                if forked_from is not None:
                    forked_from = self._numbered(session, "forked_from", forked_from).ref
                row = PolicyRow(
                    policy_id=secrets.token_hex(8),
                    tenant=self.tenant,
                    name=name,
                    base_model=base_model,
                    lora=adapter,
                    forked_from=forked_from,
                )
                session.add(row)
                session.flush()
            elif (row.base_model, row.lora) != (base_model, adapter):
                raise UsageError(
                    f"policy: {name!r} exists with base model {row.base_model!r} and LoRA config "
                    f"{row.lora}, not {base_model!r} and {adapter}; choose another name"
                )
            return row.value()

    def policy(self, name: str) -> Policy:
        """The policy of this name.

        Raises:
            NotFoundError: there is none; the message lists what exists.
        """
        with self._read() as session:
            return self._policy(session, name).value()

    def policies(self) -> list[Policy]:
        """All policies of the tenant, by name."""
        with self._read() as session:
            query = select(PolicyRow).filter_by(tenant=self.tenant).order_by(PolicyRow.name)
            return [row.value() for row in session.scalars(query)]

    def summaries(self) -> list[PolicySummary]:
        """All policies of the tenant with their counts and aliases, by name."""
        mine = select(PolicyRow.policy_id).filter_by(tenant=self.tenant)
        counting = (
            select(VersionRow.policy_id, func.count())
            .where(VersionRow.policy_id.in_(mine))
            .group_by(VersionRow.policy_id)
        )
        with self._read() as session:
            rows = session.scalars(
                select(PolicyRow).filter_by(tenant=self.tenant).order_by(PolicyRow.name)
            ).all()
            counts = dict(session.execute(counting).tuples().all())
            aliases: dict[str, dict[str, int]] = {}
            for alias in session.scalars(select(AliasRow).where(AliasRow.policy_id.in_(mine))):
                aliases.setdefault(alias.policy_id, {})[alias.alias] = alias.number
            return [
                PolicySummary(row.value(), counts.get(row.policy_id, 0), aliases.get(row.policy_id, {}))
                for row in rows
            ]
