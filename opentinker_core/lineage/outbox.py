"""Delivers the catalog's outbox in order, beside the work: an outage of MLflow loses and blocks nothing."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from opentinker_core.errors import OpenTinkerError
from opentinker_core.lineage.lease import delivery_lease
from opentinker_core.lineage.recorder import MLflowRecorder
from opentinker_core.lineage.tracking import is_outage, prefect_ui_url, tracking_target
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.outbox import OutboxEvent

if TYPE_CHECKING:
    from opentinker_core.runtime.workspace import Workspace

_LOG = logging.getLogger(__name__)
_READ = 100
_TOGETHER = 32
"""Events delivered at once: enough to share what a delivery costs, few enough to stop between two."""
_BUSY_WAIT_S = 0.1


class Outcome(StrEnum):
    """How one attempt at delivering everything ended."""

    DRAINED = "drained"
    """Nothing deliverable is left."""
    OUTAGE = "outage"
    """MLflow, or the catalog, cannot be used just now; the rest waits."""
    RETRY = "retry"
    """An event failed for its own reason and is to be tried again; those behind it wait."""
    BUSY = "busy"
    """Another process is delivering."""
    STOPPED = "stopped"
    """The deadline of `close` came first."""


@dataclass(frozen=True)
class Delivery:
    """What one attempt did, and what it left."""

    outcome: Outcome
    delivered: int
    error: str | None = None
    """Why it ended early."""


class OutboxDispatcher:
    """Delivers pending events with a recorder: on call, or from a background thread.

    Events of a tenant are delivered in order, by one process at a time, and several together. What fails
    because MLflow is out waits; what fails for its own reason is tried alone, `max_attempts` times, then kept
    with its error and skipped.
    """

    def __init__(
        self,
        catalog: Catalog,
        recorder: MLflowRecorder,
        *,
        max_attempts: int = 4,
        backoff_s: tuple[float, float] = (0.5, 30.0),
        together: int = _TOGETHER,
        poll_s: float = 20.0,
    ) -> None:
        """How it delivers.

        Args:
            max_attempts: How often an event may fail for its own reason.
            backoff_s: First and longest wait after a failure.
            together: Events delivered at once, at most.
            poll_s: Of the background thread, between deliveries: events gather that are cheaper together.
        """
        self._catalog = catalog
        self._recorder = recorder
        self._max_attempts = max_attempts
        self._backoff_s = backoff_s
        self._together = together
        self._poll_s = poll_s
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._deadline = float("inf")
        self.last: Delivery | None = None
        """The background thread's latest attempt."""

    def deliver_pending(self, *, retry_given_up: bool = False) -> Delivery:
        """Deliver what is pending, now and in order, up to the first failure that may pass.

        Args:
            retry_given_up: Try those events again, once each, that were given up.
        """
        return self._attempt(lambda: False, retry_given_up)

    def mirror_aliases(self) -> None:
        """Mirror the aliases of all policies; those that move without a new version make no event.

        Raises:
            MirrorOutageError, EventError: as for `MLflowRecorder.record`.
        """
        for policy in self._catalog.policies():
            self._recorder.mirror_aliases(policy.name)

    def pending(self) -> list[OutboxEvent]:
        """What is not in MLflow, in order; those given up among them."""
        return self._catalog.pending_events(1_000_000)

    @property
    def tracking_uri(self) -> str:
        """Where the events go."""
        return self._recorder.target.tracking_uri

    def start(self) -> None:
        """Deliver from a daemon thread until `close`; returns at once, also if it runs already."""
        if self._thread is None:
            self._closing.clear()
            self._deadline = float("inf")
            self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
            self._thread.start()

    def close(self, deadline_s: float = 10.0) -> int:
        """Deliver what is pending for at most `deadline_s` seconds, then stop the thread.

        An outage ends it at once: what is pending stays in the catalog for the next dispatcher.

        Returns:
            The number of events still pending.
        """
        self._deadline = time.monotonic() + deadline_s
        self._closing.set()
        if self._thread is not None:
            self._thread.join(deadline_s)
            self._thread = None
        return len(self.pending())

    def _run(self) -> None:
        first, longest = self._backoff_s
        wait = first
        while True:
            last = self.last = self._attempt(self._is_overdue)
            if last.outcome is Outcome.DRAINED:
                if self._closing.is_set():
                    return
                wait = first
                self._closing.wait(self._poll_s)
            elif last.outcome is Outcome.BUSY:
                if self._is_overdue():
                    return
                time.sleep(_BUSY_WAIT_S)
            elif self._closing.is_set() and last.outcome is not Outcome.RETRY:
                return
            else:
                if last.outcome is Outcome.OUTAGE and wait == first:
                    _LOG.warning("lineage events wait in the catalog: %s", last.error)
                self._closing.wait(wait)
                wait = min(2 * wait, longest)

    def _attempt(self, stopped: Callable[[], bool], retry_given_up: bool = False) -> Delivery:
        done: set[int] = set()
        delivered = 0
        try:
            with delivery_lease(self._catalog.url, self._catalog.tenant) as held:
                if not held:
                    return Delivery(Outcome.BUSY, 0)
                while events := self._deliverable(done, retry_given_up):
                    batches = deque(_batches(events, self._together))
                    while batches:
                        if stopped():
                            return Delivery(Outcome.STOPPED, delivered)
                        batch = batches.popleft()
                        error = self._deliver(batch)
                        if error is None:
                            delivered += len(batch)
                        elif len(batch) > 1:  # which of them it was shows one by one
                            batches.extendleft([event] for event in reversed(batch))
                            continue
                        elif batch[0].attempts + 1 < self._max_attempts:
                            return Delivery(Outcome.RETRY, delivered, error)
                        done.update(event.id for event in batch)
        except (OpenTinkerError, OSError) as error:  # MLflow or the catalog is out
            return Delivery(Outcome.OUTAGE, delivered, str(error))
        return Delivery(Outcome.DRAINED, delivered)

    def _is_overdue(self) -> bool:
        return time.monotonic() > self._deadline

    def _deliver(self, batch: Sequence[OutboxEvent]) -> str | None:
        """Deliver events; returns why one failed for its own reason, None if none did.

        A single event that failed is marked so; of several, none is marked.

        Raises:
            OpenTinkerError: MLflow, or the catalog, is out; the events are as they were.
        """
        try:
            self._recorder.record(batch)
        except OpenTinkerError as error:
            if is_outage(error):
                raise
            if len(batch) == 1:
                self._mark_failed(batch[0], error)
            return str(error)
        self._catalog.mark_delivered([event.id for event in batch])
        return None

    def _mark_failed(self, event: OutboxEvent, error: OpenTinkerError) -> None:
        self._catalog.mark_failed(event.id, str(error))
        if event.attempts + 1 == self._max_attempts:
            _LOG.warning("%s (event %d) is given up: %s", event.kind, event.id, error)

    def _deliverable(self, done: set[int], retry_given_up: bool) -> list[OutboxEvent]:
        """The next pending events that are not given up; at least one, if there is one."""
        limit = _READ
        while True:
            events = self._catalog.pending_events(limit)
            found = [one for one in events if one.id not in done]
            if not retry_given_up:
                found = [one for one in found if not self._given_up(one)]
            if found or len(events) < limit:
                return found
            limit *= 2

    def _given_up(self, event: OutboxEvent) -> bool:
        return event.attempts >= self._max_attempts


def _batches(events: Sequence[OutboxEvent], size: int) -> Iterator[list[OutboxEvent]]:
    """The events in order, up to `size` together; those that failed before alone."""
    batch: list[OutboxEvent] = []
    for event in events:
        if batch and (event.attempts or batch[-1].attempts or len(batch) == size):
            yield batch
            batch = []
        batch.append(event)
    yield batch


def open_dispatcher(workspace: "Workspace") -> OutboxDispatcher:
    """The dispatcher of an installation; imports and opens nothing of MLflow before it delivers."""
    settings = workspace.settings
    recorder = MLflowRecorder(
        tracking_target(settings),
        workspace.catalog,
        workspace.trajectories,
        prefect_ui_url=prefect_ui_url(),
    )
    return OutboxDispatcher(workspace.catalog, recorder)
