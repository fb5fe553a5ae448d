"""What tenants used, by the hour: counted in memory, kept in the database some seconds later.

Noun: UsageMeter.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime

from opentinker_core.errors import OpenTinkerError
from opentinker_core.policies.tables import utc_now
from opentinker_core.service.types import Usage, UsageKind

_LOG = logging.getLogger(__name__)


class UsageMeter:
    """Counts; safe to share between threads. A server that is killed forgets what it has not kept yet."""

    def __init__(self, keep: Callable[[Mapping[Usage, int]], None]) -> None:
        """`keep` adds amounts to those in the database."""
        self._keep = keep
        self._lock = threading.Lock()
        self._counts: Counter[Usage] = Counter()

    def add(
        self, tenant: str, kind: UsageKind, amount: int, *, base_model: str, session_id: str | None = None
    ) -> None:
        """Count what was done just now: tokens, or checkpoints."""
        if amount:
            usage = Usage(tenant, _hour(utc_now()), kind, base_model, session_id or "")
            with self._lock:
                self._counts[usage] += amount

    def keep(self) -> None:
        """Write down what was counted; what cannot be written is counted on. Waits for the database."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        if not counts:
            return
        try:
            self._keep(counts)
        except OpenTinkerError as error:
            with self._lock:
                self._counts.update(counts)
            _LOG.warning("usage is not kept yet: %s", error)


def _hour(at: datetime) -> datetime:
    return at.replace(minute=0, second=0, microsecond=0)
