"""Delivers the catalog's outbox in order, beside the work: an outage of MLflow loses and blocks nothing."""

import logging
import threading
import time
from collections.abc import Callable
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
_BATCH = 100
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

    Events of a tenant are delivered in order, by one process at a time. What fails because MLflow is out
    waits; what fails for its own reason is tried `max_attempts` times, then kept with its error and skipped.
    """

    def __init__(
        self,
        catalog: Catalog,
        recorder: MLflowRecorder,
        *,
        max_attempts: int = 4,
        backoff_s: tuple[float, float] = (0.5, 30.0),
        poll_s: float = 5.0,
    ) -> None:
        """`backoff_s`: first and longest wait after a failure; `poll_s`: between looks for others' events."""
        self._catalog = catalog
        self._recorder = recorder
        self._max_attempts = max_attempts
        self._backoff_s = backoff_s
        self._poll_s = poll_s
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
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

    def wake(self) -> None:
        """Say that there are new events; never blocks. During an outage the wait goes on."""
        self._wake.set()

    def close(self, deadline_s: float = 10.0) -> int:
        """Deliver what is pending for at most `deadline_s` seconds, then stop the thread.

        An outage ends it at once: what is pending stays in the catalog for the next dispatcher.

        Returns:
            The number of events still pending.
        """
        self._deadline = time.monotonic() + deadline_s
        self._closing.set()
        self._wake.set()
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
                self._wake.wait(self._poll_s)
                self._wake.clear()
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
                    for event in events:
                        if stopped():
                            return Delivery(Outcome.STOPPED, delivered)
                        error = self._deliver(event)
                        if error and event.attempts + 1 < self._max_attempts:
                            return Delivery(Outcome.RETRY, delivered, error)
                        delivered += error is None
                        done.add(event.id)
        except (OpenTinkerError, OSError) as error:  # MLflow or the catalog is out
            return Delivery(Outcome.OUTAGE, delivered, str(error))
        return Delivery(Outcome.DRAINED, delivered)

    def _is_overdue(self) -> bool:
        return time.monotonic() > self._deadline

    def _deliver(self, event: OutboxEvent) -> str | None:
        """Deliver one event; returns why it failed for its own reason, None if it did not.

        Raises:
            OpenTinkerError: MLflow, or the catalog, is out; the event is as it was.
        """
        try:
            self._recorder.record(event)
        except OpenTinkerError as error:
            if is_outage(error):
                raise
            self._catalog.mark_failed(event.id, str(error))
            if event.attempts + 1 == self._max_attempts:
                _LOG.warning("%s (event %d) is given up: %s", event.kind, event.id, error)
            return str(error)
        self._catalog.mark_delivered(event.id)
        return None

    def _deliverable(self, done: set[int], retry_given_up: bool) -> list[OutboxEvent]:
        """The next pending events that are not given up; at least one, if there is one."""
        limit = _BATCH
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
