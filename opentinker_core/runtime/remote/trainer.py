"""A trainer whose passes and steps a service makes.

The service knows the public losses, not the objectives of a run. So an objective is evaluated here, on the
logprobs that a forward pass gives, and its gradient by logprob is sent as the (signed) weights of a cross
entropy, whose gradient by the adapter is then the objective's.

Axes: N positions of a datum, M trained positions of all datums.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tinker
import torch

from opentinker_core.config.schema import LoRAConfig, OptimizerConfig
from opentinker_core.errors import UsageError
from opentinker_core.objectives.cross_entropy import cross_entropy
from opentinker_core.objectives.types import Objective, SignalBatch, finalize_metrics
from opentinker_core.runtime.remote.adapters import tinker_lora
from opentinker_core.runtime.remote.connection import Connection, service_errors
from opentinker_core.runtime.remote.reference import read_reference, write_reference
from opentinker_core.runtime.remote.sampler import RemoteSampler
from opentinker_core.sampling.distribution import SHAPE_FIELDS
from opentinker_core.sampling.protocol import BASE
from opentinker_core.training.trainer import ForwardBackward
from opentinker_core.trajectories.packing import trained_positions
from opentinker_core.trajectories.types import Datum

_PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


class RemoteTrainer:
    """See `training.Trainer`. A policy's state at the service ends with this process's session there."""

    def __init__(self, connection: Connection, base_model: str, sampler: RemoteSampler) -> None:
        """`sampler`: gives the logprobs of the base model."""
        self._connection, self._base_model, self._sampler = connection, base_model, sampler
        self._clients: dict[str, tinker.TrainingClient] = {}
        self._saved = 0

    def create(self, policy: str, lora: LoRAConfig, seed: int) -> None:
        """See `Trainer.create`.

        Raises:
            UsageError: the service makes no such adapters (see `adapters.tinker_lora`).
        """
        wanted = tinker_lora(lora)
        with service_errors():
            self._clients[policy] = self._connection.client.create_lora_training_client(
                self._base_model,
                wanted.rank,
                seed,
                wanted.train_mlp,
                wanted.train_attn,
                wanted.train_unembed,
                user_metadata={"run": policy},
            ).result()

    def load_checkpoint(self, policy: str, directory: Path, *, with_optimizer: bool = True) -> None:
        """See `Trainer.load_checkpoint`; the service loads what it saved itself.

        Raises:
            UsageError: it was not saved there.
        """
        path = read_reference(directory, self._connection, "checkpoint")
        service = self._connection.client
        # A client that failed refuses all that follows, so each load makes a new one.
        with service_errors():
            create = (
                service.create_training_client_from_state_with_optimizer
                if with_optimizer
                else service.create_training_client_from_state
            )
            self._clients[policy] = create(path, user_metadata={"run": policy}).result()

    def save_checkpoint(self, policy: str, directory: Path) -> None:
        """See `Trainer.save_checkpoint`; the files say where the service has the same."""
        with service_errors():
            path = self._client(policy).save_state(self._name(policy)).result().path
        self._fetch(path, directory)

    def publish_snapshot(self, policy: str, directory: Path) -> None:
        """See `Trainer.publish_snapshot`; the files say where the service has the same."""
        with service_errors():
            path = self._client(policy).save_weights_for_sampler(self._name(policy)).result().path
        self._fetch(path, directory)

    def forward(self, policy: str | None, datums: Sequence[Datum]) -> list[np.ndarray]:
        """See `Trainer.forward`."""
        _check_plain(datums)
        if policy is None:
            return self._base_logprobs(datums)
        data = [_wire(datum, np.zeros(len(datum), np.float32)) for datum in datums]
        with service_errors():
            return _logprobs(self._client(policy).forward(data, "cross_entropy").result(), datums)

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
        """See `Trainer.forward_backward`. One pass if the loss is a cross entropy, else two."""
        _check_plain(datums)
        if objective is cross_entropy:
            weights = [datum.signal * scale for datum, scale in zip(datums, scales, strict=True)]
            logprobs = self._backward(policy, datums, weights)
            return _evaluated(objective, datums, scales, logprobs, None, None)[0]
        logprobs = self.forward(policy, datums)
        result, gradients = _evaluated(objective, datums, scales, logprobs, reference_logprobs, old_logprobs)
        self._backward(policy, datums, [-gradient for gradient in gradients])
        return result

    def optim_step(self, policy: str, config: OptimizerConfig) -> dict[str, float]:
        """See `Trainer.optim_step`."""
        params = tinker.AdamParams(
            learning_rate=config.learning_rate,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            grad_clip_norm=config.grad_clip_norm,
        )
        with service_errors():
            return dict(self._client(policy).optim_step(params).result().metrics or {})

    def _client(self, policy: str) -> tinker.TrainingClient:
        if policy not in self._clients:
            raise UsageError(f"policy: {policy!r} has no state at the service; accepted: one that has")
        return self._clients[policy]

    def _backward(
        self, policy: str, datums: Sequence[Datum], weights: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        data = [_wire(datum, weights_N) for datum, weights_N in zip(datums, weights, strict=True)]
        with service_errors():
            return _logprobs(self._client(policy).forward_backward(data, "cross_entropy").result(), datums)

    def _base_logprobs(self, datums: Sequence[Datum]) -> list[np.ndarray]:
        client = self._sampler.client(BASE)
        with service_errors():
            asked = [
                client.compute_logprobs(tinker.ModelInput.from_ints([*d.input_tokens_N.tolist(), last]))
                for d in datums
                for last in d.target_tokens_N[-1:].tolist()
            ]
            found = [np.array(future.result()[1:], np.float32) for future in asked]
        return [np.where(d.mask_N, own_N, np.float32(0)) for d, own_N in zip(datums, found, strict=True)]

    def _name(self, policy: str) -> str:
        self._saved += 1
        return f"{policy[:40]}-{self._saved}"

    def _fetch(self, path: str, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._connection.download(path, directory)
        write_reference(directory, self._connection.url, path)


def _wire(datum: Datum, weights_N: np.ndarray) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(datum.input_tokens_N.tolist()),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(datum.target_tokens_N),
            "weights": tinker.TensorData.from_numpy(weights_N.astype(np.float32)),
        },
    )


def _logprobs(output: tinker.ForwardBackwardOutput, datums: Sequence[Datum]) -> list[np.ndarray]:
    given = [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]
    return [np.where(d.mask_N, own_N, np.float32(0)) for d, own_N in zip(datums, given, strict=True)]


def _evaluated(
    objective: Objective,
    datums: Sequence[Datum],
    scales: Sequence[np.ndarray],
    logprobs: Sequence[np.ndarray],
    reference: Sequence[np.ndarray] | None,
    old_logprobs: Sequence[np.ndarray] | None,
) -> tuple[ForwardBackward, list[np.ndarray]]:
    """What the objective gives on these logprobs, and its gradient by each of them: (N,) a datum."""
    everything = trained_positions(datums)
    logprobs_M = torch.from_numpy(everything.gather(logprobs)).requires_grad_()
    signal = SignalBatch.of(everything, datums, scales, reference, old_logprobs)
    loss, metrics = objective(logprobs_M, signal)
    (gradient_M,) = torch.autograd.grad(loss, logprobs_M)
    gradients = [np.zeros(len(datum), np.float32) for datum in datums]
    for datum, at in everything.runs():
        gradients[datum][everything.position_M[at]] = gradient_M.numpy()[at]
    return ForwardBackward(loss.item(), finalize_metrics(metrics), list(logprobs)), gradients


def _check_plain(datums: Sequence[Datum]) -> None:
    for index, datum in enumerate(datums):
        for name in SHAPE_FIELDS:
            if getattr(datum, name) != _PLAIN[name]:
                raise UsageError(
                    f"datums[{index}].{name}: {getattr(datum, name)}; accepted by a service: {_PLAIN[name]}"
                )
