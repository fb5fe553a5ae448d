"""The outbox: events written with the facts they tell, and delivered to MLflow afterwards.

Kinds and payloads: `run.started` and `run.finished` {"run_id", "status"}, `version.published`
{"run_id", "version"}, `evaluation.recorded` {"run_id", "subject"}. `run_id` is None where no run was
involved (a fork, an evaluation by hand). Delivery is at least once and in order of `id`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from opentinker_core.errors import NotFoundError
from opentinker_core.policies.scope import TenantScope
from opentinker_core.policies.tables import OutboxRow, utc_now

RUN_STARTED = "run.started"
RUN_FINISHED = "run.finished"
VERSION_PUBLISHED = "version.published"
EVALUATION_RECORDED = "evaluation.recorded"


@dataclass(frozen=True)
class OutboxEvent:
    """Something that happened and still has to be told."""

    id: int
    kind: str
    payload: dict[str, Any]
    attempts: int
    """Deliveries that failed so far."""


class Outbox(TenantScope):
    """The events of a tenant that are not delivered yet."""

    def pending_events(self, limit: int = 100) -> list[OutboxEvent]:
        """The oldest undelivered events, in order."""
        query = (
            select(OutboxRow)
            .where(OutboxRow.tenant == self.tenant, OutboxRow.delivered_at.is_(None))
            .order_by(OutboxRow.id)
            .limit(limit)
        )
        with self._read() as session:
            return [
                OutboxEvent(row.id, row.kind, row.payload, row.attempts) for row in session.scalars(query)
            ]

    def mark_delivered(self, event_ids: Collection[int]) -> None:
        """Record that events were delivered; repeating it changes nothing.

        Raises:
            NotFoundError: one of them does not exist.
        """
        with self._write() as session:
            query = select(OutboxRow).where(OutboxRow.tenant == self.tenant, OutboxRow.id.in_(event_ids))
            rows = session.scalars(query).all()
            if missing := set(event_ids) - {row.id for row in rows}:
                raise NotFoundError(f"event: there is no {', '.join(map(str, sorted(missing)))}")
            for row in rows:
                row.delivered_at = row.delivered_at or utc_now()
                row.last_error = None

    def mark_failed(self, event_id: int, error: str) -> None:
        """Record that a delivery failed; the event stays pending.

        Raises:
            NotFoundError: there is no such event.
        """
        with self._write() as session:
            row = self._event(session, event_id)
            row.attempts += 1
            row.last_error = error

    def _event(self, session: Session, event_id: int) -> OutboxRow:
        row = session.get(OutboxRow, event_id)
        if row is None or row.tenant != self.tenant:
            raise NotFoundError(f"event: there is no {event_id}")
        return row
