"""What the engine's thread runs: fused batches of operations on the trainer and the native sampler."""

from collections.abc import Callable, Sequence
from typing import Any

from opentinker_core.errors import UsageError
from opentinker_core.runtime.operations import Kind, Operation
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.sampling.protocol import BASE, SampleRequest
from opentinker_core.training.trainer import Trainer


class EngineExecutor:
    """See `operations.Executor`. Payloads are what the trainer's or sampler's method of the name takes."""

    def __init__(self, trainer: Trainer, sampler: NativeSampler) -> None:
        self._trainer, self._sampler = trainer, sampler

    def execute(self, operations: Sequence[Operation[Any]]) -> Sequence[object]:
        """Run operations of one kind; those that can be fused go through the base model together."""
        match operations[0].kind:
            case Kind.FORWARD_BACKWARD:
                return self._trainer.forward_backward_all([operation.payload for operation in operations])
            case Kind.FORWARD:
                asked = [(None if o.subject == BASE else o.subject, o.payload) for o in operations]
                return self._trainer.forward_all(asked)
            case Kind.SAMPLE:
                return self._sample(operations)
            case _:
                return [self._alone(operation) for operation in operations]

    def discard_gradients(self, policy: str) -> None:
        """Forget what `policy` has accumulated, if it has a state."""
        self._trainer.discard_gradient(policy)

    def _sample(self, operations: Sequence[Operation[Any]]) -> list[object]:
        outcomes: list[object] = [self._refusal(operation.payload) for operation in operations]
        accepted = [i for i, refusal in enumerate(outcomes) if refusal is None]
        requests: list[SampleRequest] = [r for i in accepted for r in operations[i].payload]
        answers = iter(self._sampler.sample(requests) if requests else [])
        for i in accepted:
            outcomes[i] = [next(answers) for _ in operations[i].payload]
        return outcomes

    def _refusal(self, requests: Sequence[SampleRequest]) -> UsageError | None:
        try:
            for request in requests:
                self._sampler.check(request)
        except UsageError as error:
            return error
        return None

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
            Kind.LOAD: lambda: trainer.load_checkpoint(subject, payload),
            Kind.SAVE: lambda: trainer.save_checkpoint(subject, payload),
            Kind.PUBLISH: lambda: trainer.publish_snapshot(subject, payload),
            Kind.REFRESH: lambda: self._sampler.refresh(subject, *payload),
        }
        return calls[operation.kind]()
