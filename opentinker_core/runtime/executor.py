"""What the engine's thread runs: fused batches of operations on the trainer and the native sampler."""

from collections.abc import Callable, Sequence
from typing import Any

from opentinker_core.errors import UsageError
from opentinker_core.runtime.operations import Kind, Operation, Progress, Running
from opentinker_core.sampling.generation import Ticket
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.sampling.protocol import BASE, SampleRequest
from opentinker_core.training.trainer import Trainer


class EngineExecutor:
    """See `operations.Executor`. Payloads are what the trainer's or sampler's method of the name takes."""

    def __init__(self, trainer: Trainer, sampler: NativeSampler) -> None:
        self._trainer, self._sampler = trainer, sampler
        self._tickets: dict[Operation[Any], list[Ticket]] = {}

    def execute(self, operations: Sequence[Operation[Any]]) -> Sequence[object]:
        """Run operations of one kind; those that can be fused go through the base model together."""
        match operations[0].kind:
            case Kind.FORWARD_BACKWARD:
                return self._trainer.forward_backward_all([operation.payload for operation in operations])
            case Kind.FORWARD:
                asked = [(None if o.subject == BASE else o.subject, o.payload) for o in operations]
                return self._trainer.forward_all(asked)
            case Kind.SAMPLE:
                return [self._begin(operation) for operation in operations]
            case _:
                return [self._alone(operation) for operation in operations]

    def discard_gradients(self, policy: str) -> None:
        """Forget what `policy` has accumulated, if it has a state."""
        self._trainer.discard_gradient(policy)

    def advance(self) -> list[Progress]:
        """See `Executor.advance`: one step of the sampler's running batch."""
        try:
            self._sampler.step()
        except Exception:
            for operation in list(self._tickets):
                self.drop(operation)
            raise
        return [self._progress(operation) for operation in list(self._tickets)]

    def finish(self, operation: Operation[Any]) -> object:
        """See `Executor.finish`."""
        try:
            return self._sampler.sample(operation.payload)
        except Exception as error:  # noqa: BLE001 - it is the operation's outcome
            return error

    def drop(self, operation: Operation[Any]) -> None:
        """See `Executor.drop`."""
        for ticket in self._tickets.pop(operation, ()):
            self._sampler.cancel(ticket)

    def _begin(self, operation: Operation[Any]) -> object:
        requests: Sequence[SampleRequest] = operation.payload
        try:
            for request in requests:
                self._sampler.check(request)
        except UsageError as error:
            return error
        if not requests:
            return []
        self._tickets[operation] = [self._sampler.submit(request) for request in requests]
        return Running.RUNNING

    def _progress(self, operation: Operation[Any]) -> Progress:
        tickets = self._tickets[operation]
        tokens = sum(ticket.tokens for ticket in tickets)
        errors = [ticket.outcome for ticket in tickets if isinstance(ticket.outcome, Exception)]
        if errors:
            self.drop(operation)
            return Progress(operation, tokens, errors[0])
        if any(ticket.outcome is None for ticket in tickets):
            return Progress(operation, tokens, Running.RUNNING)
        del self._tickets[operation]
        return Progress(operation, tokens, [ticket.outcome for ticket in tickets])

    def _alone(self, operation: Operation[Any]) -> object:
        try:
            return self._run(operation)
        except Exception as error:  # noqa: BLE001 - a batch that raised would be run again, steps and all
            return error

    def _run(self, operation: Operation[Any]) -> object:
        trainer, subject, payload = self._trainer, operation.subject, operation.payload
        calls: dict[Kind, Callable[[], object]] = {
            Kind.OPTIM_STEP: lambda: trainer.optim_step(subject, payload),
            Kind.CREATE: lambda: trainer.create(subject, *payload),
            Kind.LOAD: lambda: trainer.load_checkpoint(subject, payload[0], with_optimizer=payload[1]),
            Kind.UNLOAD: lambda: trainer.forget(subject),
            Kind.SAVE: lambda: trainer.save_checkpoint(subject, payload),
            Kind.PUBLISH: lambda: trainer.publish_snapshot(subject, payload),
            Kind.REFRESH: lambda: self._sampler.refresh(subject, *payload),
            Kind.RELEASE: lambda: self._sampler.release(subject),
        }
        return calls[operation.kind]()
