"""Records of usage: of each tenant, hour, session, base model and kind an amount."""

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import delete, select, update

from opentinker_core.service.record_scope import RecordScope
from opentinker_core.service.tables import UsageRow
from opentinker_core.service.types import Usage, UsageKind


class UsageRecords(RecordScope):
    """The usage of all tenants."""

    def add_usage(self, amounts: Mapping[Usage, int]) -> None:
        """Add to what is there."""
        with self._database.write("") as session:
            for usage, amount in amounts.items():
                fields = {
                    "tenant": usage.tenant,
                    "hour": usage.hour,
                    "kind": usage.kind.value,
                    "base_model": usage.base_model,
                    "session_id": usage.session_id,
                }
                known = select(UsageRow.id).filter_by(**fields)
                row_id = session.scalar(known)
                if row_id is None:
                    session.add(UsageRow(**fields, amount=amount))
                else:
                    more = UsageRow.amount + amount
                    session.execute(update(UsageRow).where(UsageRow.id == row_id).values(amount=more))

    def usage(self, tenant: str, begin: datetime, end: datetime) -> list[tuple[Usage, int]]:
        """A tenant's in the hours from `begin` up to `end`: by hour, the largest amounts first."""
        query = (
            select(UsageRow)
            .where(UsageRow.tenant == tenant, UsageRow.hour >= begin, UsageRow.hour < end)
            .order_by(UsageRow.hour, UsageRow.amount.desc(), UsageRow.id)
        )
        with self._database.read() as session:
            return [
                (
                    Usage(row.tenant, row.hour, UsageKind(row.kind), row.base_model, row.session_id),
                    row.amount,
                )
                for row in session.scalars(query)
            ]

    def forget_usage(self, before: datetime) -> None:
        """Forget what is older."""
        with self._database.write("") as session:
            session.execute(delete(UsageRow).where(UsageRow.hour < before))
