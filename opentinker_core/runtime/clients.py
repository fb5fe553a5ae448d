"""What one tenant sees of a shared engine: a trainer and a sampler whose calls go through its queue."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from opentinker_core.config.schema import LoRAConfig, OptimizerConfig
from opentinker_core.objectives.types import Objective
from opentinker_core.runtime.operations import Kind, Operation
from opentinker_core.runtime.scheduler import Scheduler
from opentinker_core.sampling.protocol import BASE, SampledSequence, SampleRequest
from opentinker_core.training.trainer import ForwardBackward, PolicyBatch
from opentinker_core.trajectories.types import Datum


class TrainerClient:
    """The trainer's primitives (see `training.Trainer`); each call waits for its turn and its result."""

    def __init__(self, scheduler: Scheduler, tenant: str) -> None:
        self._scheduler, self._tenant = scheduler, tenant

    def create(self, policy: str, lora: LoRAConfig, seed: int) -> None:
        """See `Trainer.create`."""
        self._scheduler.call(Operation[None](Kind.CREATE, self._tenant, policy, (lora, seed)))

    def load_checkpoint(self, policy: str, directory: Path, *, with_optimizer: bool = True) -> None:
        """See `Trainer.load_checkpoint`."""
        self._scheduler.call(Operation[None](Kind.LOAD, self._tenant, policy, (directory, with_optimizer)))

    def forget(self, policy: str) -> None:
        """See `Trainer.forget`."""
        self._scheduler.call(Operation[None](Kind.UNLOAD, self._tenant, policy))

    def save_checkpoint(self, policy: str, directory: Path) -> None:
        """See `Trainer.save_checkpoint`."""
        self._scheduler.call(Operation[None](Kind.SAVE, self._tenant, policy, directory))

    def publish_snapshot(self, policy: str, directory: Path) -> None:
        """See `Trainer.publish_snapshot`."""
        self._scheduler.call(Operation[None](Kind.PUBLISH, self._tenant, policy, directory))

    def forward(self, policy: str | None, datums: Sequence[Datum]) -> list[np.ndarray]:
        """See `Trainer.forward`."""
        subject = BASE if policy is None else policy
        operation = Operation[list[np.ndarray]](
            Kind.FORWARD, self._tenant, subject, datums, tokens=_tokens(datums), size_bytes=_size(datums)
        )
        return self._scheduler.call(operation)

    def forward_backward(
        self,
        policy: str,
        datums: Sequence[Datum],
        objective: Objective,
        scales: Sequence[np.ndarray],
        *,
        reference_logprobs: Sequence[np.ndarray] | None = None,
        old_logprobs: Sequence[np.ndarray] | None = None,
    ) -> ForwardBackward:
        """See `Trainer.forward_backward`."""
        batch = PolicyBatch(policy, datums, objective, scales, reference_logprobs, old_logprobs)
        operation = Operation[ForwardBackward](
            Kind.FORWARD_BACKWARD,
            self._tenant,
            policy,
            batch,
            tokens=_tokens(datums),
            size_bytes=_size(datums),
        )
        return self._scheduler.call(operation)

    def optim_step(self, policy: str, config: OptimizerConfig) -> dict[str, float]:
        """See `Trainer.optim_step`."""
        return self._scheduler.call(
            Operation[dict[str, float]](Kind.OPTIM_STEP, self._tenant, policy, config)
        )


class SamplerClient:
    """A `Sampler` whose requests share decode batches with those of other tenants."""

    def __init__(self, scheduler: Scheduler, tenant: str) -> None:
        self._scheduler, self._tenant = scheduler, tenant

    def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        """See `Sampler.refresh`."""
        self._scheduler.call(_refresh(self._tenant, version, snapshot_uri, digest))

    def release(self, version: str) -> None:
        """See `Sampler.release`."""
        self._scheduler.call(_release(self._tenant, version))

    def submit_refresh(self, version: str, snapshot_uri: str, digest: str) -> Future[None]:
        """Begin `refresh`; raises as `submit` does."""
        return self._scheduler.submit(_refresh(self._tenant, version, snapshot_uri, digest))

    def submit_release(self, version: str) -> Future[None]:
        """Begin `release`; raises as `submit` does."""
        return self._scheduler.submit(_release(self._tenant, version))

    def submit(self, requests: Sequence[SampleRequest]) -> Future[list[list[SampledSequence]]]:
        """Begin `sample` for requests of one version; nobody is waited for.

        Raises:
            BusyError: the queue has no room now.
            ClosedError: the engine is closed.
        """
        return self._scheduler.submit(self._operation(requests))

    def withdraw(self, future: Future[Any]) -> None:
        """Say that nobody wants what was begun: see `Scheduler.withdraw`."""
        self._scheduler.withdraw(future)

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[SampledSequence]]:
        """See `Sampler.sample`."""
        by_version: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_version.setdefault(request.version, []).append(index)
        futures = [
            (indices, self._scheduler.submit(self._operation([requests[i] for i in indices]), timeout=None))
            for indices in by_version.values()
        ]
        results: list[list[SampledSequence]] = [[] for _ in requests]
        try:
            for indices, future in futures:
                for index, sequences in zip(indices, future.result(), strict=True):
                    results[index] = sequences
        except BaseException:
            for _, future in futures:
                self._scheduler.withdraw(future)
            raise
        return results

    def _operation(self, requests: Sequence[SampleRequest]) -> Operation[list[list[SampledSequence]]]:
        tokens = sum(len(r.prompt_tokens) + len(r.seeds) * r.params.max_tokens for r in requests)
        sequences = sum(len(request.seeds) for request in requests)
        return Operation(
            Kind.SAMPLE, self._tenant, requests[0].version, requests, tokens=tokens, sequences=sequences
        )


def _refresh(tenant: str, version: str, snapshot_uri: str, digest: str) -> Operation[None]:
    return Operation(Kind.REFRESH, tenant, version, (snapshot_uri, digest))


def _release(tenant: str, version: str) -> Operation[None]:
    return Operation(Kind.RELEASE, tenant, version)


def _tokens(datums: Sequence[Datum]) -> int:
    return sum(len(datum) for datum in datums)


def _size(datums: Sequence[Datum]) -> int:
    """Bytes, about: two arrays of int64, one of bool and three of float32 a position."""
    return 29 * _tokens(datums)
