"""An executor that computes nothing, and keeps the books on what it was asked to do."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentinker_core.runtime.batching import BatchLimits
from opentinker_core.runtime.operations import Executor, Kind, Operation
from opentinker_core.runtime.scheduler import Scheduler


@dataclass(frozen=True)
class Fails:
    """A payload: the operation fails alone."""

    error: Exception


@dataclass(frozen=True)
class Sinks:
    """A payload: the whole batch it is in fails."""

    error: Exception


@dataclass
class Bookkeeper(Executor):
    """Gives each operation itself as its result; waits for `open` before each batch."""

    batches: list[list[Operation[Any]]] = field(default_factory=list)
    """What was executed to its end, alone or together."""
    gradients: dict[str, list[Operation[Any]]] = field(default_factory=dict)
    """Of each policy, the forward_backwards since its gradients were last cleared."""
    steps: list[tuple[Operation[Any], list[Operation[Any]]]] = field(default_factory=list)
    """The steps taken, with what gave their gradients."""
    discarded: list[str] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)
    started: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.open.set()

    @property
    def executed(self) -> list[Operation[Any]]:
        """All operations in the order in which they ran, failed ones included."""
        return [operation for batch in self.batches for operation in batch]

    def execute(self, operations: Sequence[Operation[Any]]) -> Sequence[object]:
        self.started.set()
        self.open.wait()
        for operation in operations:
            if isinstance(operation.payload, Sinks):
                if len(operations) == 1:
                    self.batches.append(list(operations))
                raise operation.payload.error
        self.batches.append(list(operations))
        return [self._execute(operation) for operation in operations]

    def discard_gradients(self, policy: str) -> None:
        self.discarded.append(policy)
        self.gradients.pop(policy, None)

    def _execute(self, operation: Operation[Any]) -> object:
        if isinstance(operation.payload, Fails):
            return operation.payload.error
        if operation.kind is Kind.FORWARD_BACKWARD:
            self.gradients.setdefault(operation.subject, []).append(operation)
        elif operation.kind is Kind.OPTIM_STEP:
            self.steps.append((operation, self.gradients.pop(operation.subject, [])))
        elif operation.kind in (Kind.CREATE, Kind.LOAD):
            self.gradients.pop(operation.subject, None)
        return operation


def operation(
    kind: Kind, subject: str = "adder", payload: Any = None, *, tenant: str = "tenant", **sizes: int
) -> Operation[Any]:
    """An operation of the only tenant, unless said otherwise."""
    return Operation(kind, tenant, subject, payload, **sizes)


PLUG = operation(Kind.SAVE, "plug", tenant="plug")


@contextmanager
def held(bookkeeper: Bookkeeper, plug: Operation[Any] = PLUG, **arguments: Any) -> Iterator[Scheduler]:
    """A scheduler whose thread is busy with `plug` until `bookkeeper.open` is set, so that all else waits."""
    with Scheduler(bookkeeper, BatchLimits(slots=4), **arguments) as scheduler:
        bookkeeper.open.clear()
        scheduler.submit(plug)
        bookkeeper.started.wait()
        try:
            yield scheduler
        finally:
            bookkeeper.open.set()
