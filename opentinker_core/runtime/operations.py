"""What an engine is asked to do, and what does it: Kind, Operation, Executor; the errors of its queue."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Generic, Protocol, TypeVar

from opentinker_core.errors import OpenTinkerError, UsageError

Result = TypeVar("Result")

Lane = tuple[str, str]
"""(tenant, subject): operations of one lane run in the order in which they were submitted."""


class Kind(StrEnum):
    """What an operation does."""

    FORWARD_BACKWARD = "forward_backward"
    """Adds gradients to those its policy has accumulated."""
    FORWARD = "forward"
    """Logprobs under a policy or the base model; changes nothing."""
    OPTIM_STEP = "optim_step"
    """One optimizer step with the accumulated gradients, which are cleared."""
    CREATE = "create"
    """Gives a policy a fresh state."""
    LOAD = "load"
    """Gives a policy the state of a checkpoint, or its weights alone."""
    UNLOAD = "unload"
    """Frees the state of a policy, which has none afterwards."""
    SAVE = "save"
    """Writes a checkpoint of a policy's state."""
    PUBLISH = "publish"
    """Writes a sampler snapshot of a policy's weights."""
    SAMPLE = "sample"
    """Completions by one version, or by the base model."""
    REFRESH = "refresh"
    """Makes a version available for sampling."""
    RELEASE = "release"
    """Says that a version is not asked for again."""


FUSED = frozenset({Kind.FORWARD_BACKWARD, Kind.FORWARD, Kind.OPTIM_STEP, Kind.SAMPLE})
"""Operations of one of these kinds share a batch, whatever their policies; others run alone."""

TRAINS = frozenset({Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP, Kind.CREATE, Kind.LOAD})
"""What changes a policy's state or gradients: what comes behind it counts on it."""

REPLACES_STATE = frozenset({Kind.CREATE, Kind.LOAD, Kind.UNLOAD})
"""What gives a policy a whole new state, with no gradients, or none, whatever became of the old one."""


@dataclass(frozen=True, eq=False)
class Operation(Generic[Result]):
    """One thing to do for one tenant, on one policy or version; its future gives a `Result`."""

    kind: Kind
    tenant: str
    subject: str
    """The policy it names; of `sample` and `refresh` the version; `protocol.BASE`: the base model.
    As the executor knows it: tenants that use one name mean one thing."""
    payload: Any = None
    """What the executor needs to know besides; not looked at by the queue."""
    tokens: int = 0
    """Tokens it puts through the base model at most: what fairness and the budget of a batch count."""
    sequences: int = 0
    """Of `sample`: completions."""
    size_bytes: int = 0
    """Host memory that it holds while it waits."""

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "size_bytes"):
            if (value := getattr(self, name)) < 0:
                raise UsageError(f"{name}: {value} of {self} is not accepted; accepted: at least 0")

    def __str__(self) -> str:
        return f"{self.kind} of {self.subject!r}"

    @property
    def lane(self) -> Lane:
        """The operations it keeps its order with."""
        return (self.tenant, self.subject)


class Running(Enum):
    """The outcome of an operation that goes on: `Executor.advance` moves it, and gives its outcome later."""

    RUNNING = "running"


@dataclass(frozen=True, eq=False)
class Progress:
    """How far an operation has got that goes on."""

    operation: Operation[Any]
    tokens: int
    """That it put through the base model since it began."""
    outcome: object
    """Its result, the exception it failed with, or `Running.RUNNING`."""


class Executor(Protocol):
    """Does the work: called by one thread, one call at a time."""

    def execute(self, operations: Sequence[Operation[Any]]) -> Sequence[object]:
        """Run one operation, or several of one kind, in order (of one lane: as they stand).

        Returns:
            Of each operation its result, the exception it failed with, or `Running.RUNNING`. A failed
            operation leaves nothing behind: no gradients, no new state, no visible files. The one
            exception is an `optim_step` whose error is not a `UsageError`: its policy's state counts as
            spoilt.

        Raises:
            Exception: the batch could not run, and nothing of it was done: a `forward_backward` has
                left no gradients of any policy, no step was taken. The operations of a batch of
                several are then tried again one by one. An executor that runs steps one after the
                other must therefore give what one of them raises as its outcome, whatever it is:
                those before it would be taken twice.
        """
        ...

    def discard_gradients(self, policy: str) -> None:
        """Forget the gradients `policy` has accumulated; no error if it has none, or no state."""
        ...

    def advance(self) -> Sequence[Progress]:
        """Move all operations that go on by one step, and say of each how far it is.

        Raises:
            Exception: the step could not run, and none of them goes on. They are then run again, one by
                one and to their ends, by `finish`.
        """
        ...

    def finish(self, operation: Operation[Any]) -> object:
        """Run one operation that could go on to its end; gives its result or exception."""
        ...

    def drop(self, operation: Operation[Any]) -> None:
        """End an operation that goes on; no outcome is given."""
        ...


class BusyError(OpenTinkerError):
    """The queue is full; the same operation is accepted later."""


class ClosedError(OpenTinkerError):
    """The engine takes no operations any more."""


class DependencyError(OpenTinkerError):
    """An operation was not run, because one of its policy that it depends on has failed before."""

    def __init__(
        self, operation: Operation[Any], cause: Operation[Any], error: BaseException, then: str = ""
    ) -> None:
        """`then`: what follows for the policy."""
        reason = str(error) or type(error).__name__
        super().__init__(
            f"{operation} was not run, because the {cause.kind} before it failed: {reason}"
            + (f"; {then}" if then else "")
        )
        self.cause = cause
        """The operation that failed by itself."""
        self.error = error
        """What it failed with."""
        self.__cause__ = error
