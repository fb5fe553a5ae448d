"""What a server holds for its clients: Holdings. When no client has a session, nothing."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from opentinker_core.service.metrics import Metrics

if TYPE_CHECKING:
    from opentinker_core.service.core import Service

_MEANINGS = {
    "sessions": "Sessions that have not ended.",
    "policies_resident": "Policies in training.",
    "futures": "Futures that are kept.",
    "futures_pending": "Futures without an outcome.",
    "work_running": "Training operations and samples that wait or run.",
    "versions_wanted": "Versions that somebody samples from right now.",
}


@dataclass(frozen=True)
class Holdings:
    """Counts at one moment; of all tenants."""

    sessions: int
    policies_resident: int
    futures: int
    futures_pending: int
    work_running: int
    versions_wanted: int

    @classmethod
    def of(cls, service: "Service") -> "Holdings":
        """What `service` holds now."""
        return cls(
            sessions=service.sessions.live,
            policies_resident=service.training.resident,
            futures=len(service.futures),
            futures_pending=service.futures.pending,
            work_running=service.quotas.running,
            versions_wanted=sum(users > 0 for users in service.sampling.leases.users.values()),
        )


def show(metrics: Metrics, service: "Service") -> None:
    """Add what `service` holds to its metrics."""
    for name, meaning in _MEANINGS.items():
        metrics.gauge(name, meaning, partial(_count, service, name))


def _count(service: "Service", name: str) -> float:
    return float(getattr(Holdings.of(service), name))
