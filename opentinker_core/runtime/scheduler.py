"""The engine's queue: any thread submits operations, one thread runs them in fused batches.

Order: the operations of one tenant on one policy run as they were submitted, as do those on one
version (`refresh` before `sample`); nothing else is ordered. What runs together: see `batching`.
What a failure means for later operations: see `chains`.
"""

import atexit
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from itertools import count
from types import TracebackType
from typing import Any

from opentinker_core.errors import OpenTinkerError
from opentinker_core.runtime.batching import Batch, BatchLimits, FairShares, form_batch, join_streams
from opentinker_core.runtime.chains import Chains
from opentinker_core.runtime.company import Company
from opentinker_core.runtime.operation_queue import DEFAULT_BOUNDS, Entry, OperationQueue, QueueBounds
from opentinker_core.runtime.operations import (
    TRAINS,
    BusyError,
    ClosedError,
    DependencyError,
    Executor,
    Operation,
    Result,
    Running,
)
from opentinker_core.runtime.scheduler_statistics import Statistics, Tally
from opentinker_core.runtime.streams import Streams

_LOG = logging.getLogger(__name__)

COMPANY_SECONDS = 0.005
"""Long enough for a client that only looks at its result, short beside a pass through a model."""


class Scheduler:
    """Queues operations and runs them on a thread of its own until it is closed.

    A batch that has room may wait for company, `company_seconds` at most (see `company`).
    """

    def __init__(
        self,
        executor: Executor,
        limits: BatchLimits,
        bounds: QueueBounds = DEFAULT_BOUNDS,
        *,
        company_seconds: float = COMPANY_SECONDS,
    ) -> None:
        self._executor = executor
        self._limits = limits
        # Guards everything below; notified when operations arrive, when some leave, and on closing.
        self._changed = threading.Condition()
        self._queue = OperationQueue(bounds)
        self._shares = FairShares(company_lead=limits.tokens)
        self._chains = Chains()
        self._tally = Tally()
        self._numbers = count()
        self._running: dict[int, Entry] = {}
        self._streams = Streams()
        self._withdrawn: set[Future[Any]] = set()
        self._company = Company(company_seconds)
        self._closed_because: str | None = None
        self._worker = threading.Thread(target=self._work, name="opentinker-engine", daemon=True)
        self._worker.start()
        atexit.register(self.close, drain=False)

    def submit(self, operation: Operation[Result], *, timeout: float | None = 0.0) -> Future[Result]:
        """Queue `operation`; its future can be cancelled until it runs.

        Args:
            timeout: seconds to wait for room in the queue; None: as long as it takes.

        Raises:
            BusyError: there was no room in time; the message names the bound and what waits.
            UsageError: the operation alone is larger than a bound.
            ClosedError: the scheduler is closed.
        """
        with self._changed:
            self._queue.check(operation)
            self._changed.wait_for(
                lambda: self._closed_because or self._queue.full(operation) is None, timeout
            )
            if self._closed_because:
                raise ClosedError(f"{operation}: {self._closed_because}")
            if full := self._queue.full(operation):
                raise BusyError(f"{operation} is too much now; {full}")
            entry = Entry(next(self._numbers), operation)
            self._queue.add(entry)
            self._shares.joined(operation.tenant)
            self._company.arrived(operation.lane)
            self._changed.notify_all()
        return entry.future

    def call(self, operation: Operation[Result], *, timeout: float | None = None) -> Result:
        """Queue `operation`, wait for it and give its result, or raise what it failed with.

        Raises:
            OpenTinkerError: called by the scheduler's own thread, which would wait for itself.
        """
        if threading.current_thread() is self._worker:
            raise OpenTinkerError(f"{operation}: call waits for the thread that calls; accepted: submit")
        future = self.submit(operation, timeout=timeout)
        try:
            return future.result()
        except BaseException:
            self.withdraw(future)  # it is not done if this is an interrupt
            self.acknowledge(operation)
            raise

    def withdraw(self, future: Future[Any]) -> None:
        """Say that nobody wants the result: what waits is cancelled, what decodes ends early.

        Nothing happens to others that run.
        """
        if future.cancel():
            return
        with self._changed:
            if any(entry.future is future for entry in self._streams.entries):
                self._withdrawn.add(future)

    def acknowledge(self, operation: Operation[Any]) -> None:
        """Say that its client knows that `operation` failed, and goes on from there (see `chains`)."""
        with self._changed:
            self._chains.acknowledge(operation)

    def statistics(self) -> Statistics:
        """Counts of what waits, runs and ran."""
        with self._changed:
            return self._tally.statistics(self._queue, self._running.values())

    def close(self, *, drain: bool = True) -> None:
        """Take no more operations, run (`drain`) or cancel those that wait, and end the thread.

        Returns when the thread has ended, unless called by it (by a callback, or a finalizer).
        """
        with self._changed:
            self._closed_because = self._closed_because or "the engine is closed"
            waiting = [] if drain else self._queue.take_all()
            if not drain:
                self._withdrawn.update(entry.future for entry in self._streams.entries)
            self._changed.notify_all()
        for entry in waiting:
            entry.future.cancel()
            entry.future.set_running_or_notify_cancel()
            self._end(entry, CancelledError())
        if threading.current_thread() is not self._worker:
            self._worker.join()
        atexit.unregister(self.close)

    def __enter__(self) -> "Scheduler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=error is None)

    def _work(self) -> None:
        try:
            while self._run_next():
                pass  # nothing of the last batch is kept here while the next one is waited for
        except BaseException as error:
            self._abandon(error)
            raise

    def _next(self) -> Batch | None:
        """Wait for something to run and take it from the queue; None: closed, and nothing waits.

        A batch without entries is a step of the streams.
        """
        with self._changed:
            while True:
                if len(self._streams):
                    return self._taken(self._beside_streams())
                if not len(self._queue):
                    self._shares.idle()
                    if self._closed_because:
                        return None
                    self._changed.wait()
                    continue
                batch = form_batch(self._queue.lanes, self._shares, self._limits)
                patience = self._company.patience() if batch.has_room and not self._closed_because else 0.0
                if patience <= 0:
                    return self._taken(batch)
                self._changed.wait(patience)

    def _beside_streams(self) -> Batch:
        """What runs next while streams do: what joins them, a batch whose turn comes before, or a step."""
        lanes, running = self._queue.lanes, self._streams.operations
        if joining := join_streams(lanes, self._shares, self._limits, running):
            return joining
        kinds = {operation.kind for operation in running}
        others = {lane: entries for lane, entries in lanes.items() if entries[0].operation.kind not in kinds}
        turn = self._streams.turn()
        if others:
            batch = form_batch(others, self._shares, self._limits)
            first = min(batch.entries, key=lambda entry: entry.number)
            if (self._shares.time_of(batch.entries[0].operation.tenant), first.number) < turn:
                return batch
        self._shares.reached(turn[0])
        return Batch((), has_room=True)

    def _taken(self, batch: Batch) -> Batch:
        self._queue.take(batch.entries)
        self._running |= {entry.number: entry for entry in batch.entries}
        self._changed.notify_all()
        return batch

    def _run_next(self) -> bool:
        batch = self._next()
        if batch is None:
            return False
        if batch.entries:
            self._run_batch(batch)
        else:
            self._advance()
        return True

    def _run_batch(self, batch: Batch) -> None:
        first = batch.entries[0].operation
        refusals = {entry.number: self._refusal(entry) for entry in batch.entries}
        entries = [entry for entry in batch.entries if refusals[entry.number] is None]
        with self._changed:
            starts = {entry.number: self._shares.time_of(entry.operation.tenant) for entry in entries}
            self._shares.served(first.tenant, [entry.operation for entry in entries])
            if entries:
                self._tally.ran(first.kind, len(entries))
        outcomes = iter(self._outcomes(entries))
        # In the order of the entries, and after all ran: what is refused may discard gradients, those
        # of entries before it among them.
        for entry in batch.entries:
            refusal = refusals[entry.number]
            outcome = next(outcomes) if refusal is None else refusal
            if outcome is Running.RUNNING:
                with self._changed:
                    self._streams.begin(entry, starts[entry.number])
            else:
                self._settle(entry, outcome)
                if not isinstance(outcome, BaseException):
                    with self._changed:
                        self._tally.went(first.kind, entry.operation.tokens)
        with self._changed:
            self._company.answered([entry.operation for entry in entries], self._queue.lanes.keys())

    def _advance(self) -> None:
        """A step of the streams."""
        self._drop_withdrawn()
        with self._changed:
            running = self._streams.entries
            if running:
                self._tally.ran(running[0].operation.kind, len(running))
        if not running:
            return
        try:
            progress = self._executor.advance()
        except Exception as error:  # noqa: BLE001 - it is the operations' outcome
            for entry in running:
                self._end_stream(entry, error if len(running) == 1 else self._finish(entry))
            return
        with self._changed:
            before = self._streams.tokens
            noted = self._streams.note(progress)
            self._tally.went(running[0].operation.kind, self._streams.tokens - before)
        for entry, one in noted:
            if one.outcome is not Running.RUNNING:
                self._end_stream(entry, one.outcome)

    def _finish(self, entry: Entry) -> object:
        try:
            return self._executor.finish(entry.operation)
        except Exception as error:  # noqa: BLE001 - it is the operation's outcome
            return error

    def _end_stream(self, entry: Entry, outcome: object) -> None:
        with self._changed:
            self._streams.end(entry)
        self._settle(entry, outcome)
        with self._changed:
            self._company.answered([entry.operation], self._queue.lanes.keys())

    def _drop_withdrawn(self) -> None:
        with self._changed:
            dropped = [entry for entry in self._streams.entries if entry.future in self._withdrawn]
            self._withdrawn.clear()
        for entry in dropped:
            self._executor.drop(entry.operation)
            self._end_stream(entry, ClosedError(f"{entry.operation}: nobody waits for it any more"))

    def _refusal(self, entry: Entry) -> BaseException | None:
        """Why `entry` is not to be run, if it was cancelled or must not be."""
        if not entry.future.set_running_or_notify_cancel():
            return CancelledError()
        with self._changed:
            return self._chains.refusal(entry.operation)

    def _outcomes(self, entries: Sequence[Entry]) -> Sequence[object]:
        """Of each entry its result or exception."""
        if not entries:
            return []
        operations = [entry.operation for entry in entries]
        try:
            outcomes = self._executor.execute(operations)
        except Exception as error:  # noqa: BLE001 - it is the operation's outcome
            if len(entries) == 1:
                return [error]
            _LOG.warning(
                "a batch of %d %s failed, each is run alone: %s", len(entries), operations[0].kind, error
            )
            return [outcome for entry in entries for outcome in self._outcomes([entry])]
        if len(outcomes) != len(operations):
            message = f"the executor gave {len(outcomes)} outcomes for {len(operations)} operations"
            return [OpenTinkerError(message) for _ in operations]
        return outcomes

    def _settle(self, entry: Entry, outcome: object) -> None:
        """Note how `entry` ended, fail what waits behind it if it depends on it, then tell the clients."""
        operation, ended, discard = entry.operation, [(entry, outcome)], False
        with self._changed:
            if not isinstance(outcome, BaseException):
                self._chains.succeeded(operation)
            else:
                discard = self._chains.failed(operation, outcome)
                if operation.kind in TRAINS:
                    for behind in self._queue.take_dependent(operation.lane):
                        error = _not_run(behind.operation, operation, outcome)
                        discard |= self._chains.failed(behind.operation, error)
                        behind.future.set_running_or_notify_cancel()
                        ended.append((behind, error))
                    self._changed.notify_all()
        if discard:
            self._discard_gradients(operation)
        for settled, result in ended:
            self._end(settled, result)

    def _discard_gradients(self, operation: Operation[Any]) -> None:
        try:
            self._executor.discard_gradients(operation.subject)
        except Exception as error:  # noqa: BLE001 - every later operation of the policy will tell
            with self._changed:
                self._chains.spoilt(operation, error)

    def _end(self, entry: Entry, outcome: object) -> None:
        """Count `entry`, whose future runs or is cancelled, and give its future the outcome.

        Never called with the lock held: the clients' callbacks run in here.
        """
        future, cancelled, failed = entry.future, entry.future.cancelled(), isinstance(outcome, BaseException)
        with self._changed:
            how = "cancelled" if cancelled else "failed" if failed else "done"
            self._tally.ended(entry.operation.kind, how)
            self._running.pop(entry.number, None)
        if cancelled:
            return
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _abandon(self, error: BaseException) -> None:
        """Fail everything, because the thread ends by a defect (or an exit) that no operation explains."""
        reason = f"the engine stopped: {type(error).__name__}: {error}"
        with self._changed:
            self._closed_because = reason
            left = [*self._running.values(), *self._queue.take_all()]
            self._changed.notify_all()
        for entry in left:
            if not entry.future.done():
                if not entry.future.running():
                    entry.future.set_running_or_notify_cancel()
                self._end(entry, ClosedError(f"{entry.operation}: {reason}"))


def _not_run(operation: Operation[Any], before: Operation[Any], error: BaseException) -> DependencyError:
    """The error of an operation that waited behind one that failed, or was itself not run."""
    if isinstance(error, DependencyError):
        return DependencyError(operation, error.cause, error.error)
    return DependencyError(operation, before, error)
