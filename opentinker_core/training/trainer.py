"""The trainer's primitives, each naming a policy: forward, forward_backward, optim_step, state in and out.

Axes: M weighted positions, N positions of a datum, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from opentinker_core.config.schema import LoRAConfig, OptimizerConfig
from opentinker_core.errors import UsageError
from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.layer import LoRALinear, applied, target_shapes
from opentinker_core.lora.peft_format import read_peft, write_peft
from opentinker_core.models.decoder import Decoder
from opentinker_core.objectives.types import Objective, SignalBatch, combine_metrics, finalize_metrics
from opentinker_core.sampling.distribution import log_distribution
from opentinker_core.training.state import PolicyState
from opentinker_core.trajectories.packing import MicroBatch, micro_batches
from opentinker_core.trajectories.types import Datum

_HEAD_CHUNK = 1024
"""Positions whose logits exist at once while gradients are recorded."""


@dataclass(frozen=True)
class ForwardBackward:
    """What one `forward_backward` gave."""

    loss: float
    """The normalized sum over the whole batch."""
    metrics: dict[str, float]
    logprobs: list[np.ndarray]
    """Of each datum, float32 (N,): the policy's logprob of each target, 0 where the mask is false."""


@dataclass(frozen=True)
class LayoutSettings:
    """How batches are laid out; none of it changes losses or gradients."""

    micro_batch_tokens: int = 4096
    share_prefix: bool = True
    pack: bool = False


class Trainer:
    """Trains policies over one frozen base model whose linears are `LoRALinear` layers."""

    def __init__(
        self,
        decoder: Decoder,
        layers: dict[str, LoRALinear],
        base_model: str,
        layout: LayoutSettings = LayoutSettings(),
    ) -> None:
        self._decoder = decoder
        self._layers = layers
        self._base_model = base_model
        self.layout = layout
        self._device = decoder.device
        self._shapes = {n: (x.base.in_features, x.base.out_features) for n, x in layers.items()}
        self._policies: dict[str, PolicyState] = {}

    def create(self, policy: str, lora: LoRAConfig, seed: int) -> None:
        """Give `policy` a fresh state, replacing any it had.

        Raises:
            UsageError: a LoRA target matches no layer.
        """
        self._policies[policy] = PolicyState.fresh(
            lora, target_shapes(self._layers, lora), seed, self._device
        )

    def load_checkpoint(self, policy: str, directory: Path) -> None:
        """Give `policy` the state of a checkpoint directory, replacing any it had."""
        self._policies[policy] = PolicyState.load(directory, self._shapes, self._device)

    def save_checkpoint(self, policy: str, directory: Path) -> None:
        """Write weights, optimizer state, seed and step of `policy` below `directory`."""
        self._state(policy).save(directory, self._base_model)

    def publish_snapshot(self, policy: str, directory: Path) -> None:
        """Write the weights of `policy` below `directory` as a PEFT directory."""
        write_peft(self._state(policy).adapter, directory, self._base_model)

    def read_adapter(self, directory: Path) -> Adapter:
        """Load a sampler snapshot for this model, outside of any policy's state."""
        return read_peft(directory, self._shapes, self._device)

    def step_of(self, policy: str) -> int:
        """Optimizer steps that the resident state of `policy` has taken."""
        return self._state(policy).step

    def forward(self, policy: str | None, datums: Sequence[Datum]) -> list[np.ndarray]:
        """Logprobs of each datum's targets, float32 (N,), 0 where the mask is false; None: the base model.

        Raises:
            UsageError: `policy` has no resident state, or the datums differ in temperature, top_p or top_k.
        """
        adapter = None if policy is None else self._state(policy).adapter
        logprobs = [np.zeros(len(datum.mask_N), np.float32) for datum in datums]
        with torch.no_grad(), applied(adapter):
            for batch in self._micro_batches(datums):
                _scatter(self._logprobs(batch, datums, adapter), batch, logprobs)
        return logprobs

    def forward_backward(
        self,
        policy: str,
        datums: Sequence[Datum],
        objective: Objective,
        scales: Sequence[np.ndarray],
        *,
        with_reference: bool = False,
    ) -> ForwardBackward:
        """Add the gradient of the objective over all of `datums` to those `policy` has accumulated.

        Args:
            scales: of each datum, float (N,): the factor of each token's loss, from a normalizer
                over the global batch (`objectives.normalizers.token_scales`).
            with_reference: give the objective the base model's logprobs too.

        Raises:
            UsageError: `policy` has no resident state, there are no datums, or they differ in
                temperature, top_p or top_k.
            TrajectoryError: some datums have weights and some advantages, or `scales` does not fit them.
        """
        adapter = self._state(policy).adapter
        if not datums:
            raise UsageError("datums: [] is not accepted; accepted: at least one datum")
        reference = self.forward(None, datums) if with_reference else None
        logprobs = [np.zeros(len(datum.mask_N), np.float32) for datum in datums]
        loss_sum, sums = 0.0, []
        for batch in self._micro_batches(datums):
            with applied(adapter):
                logprobs_M = self._logprobs(batch, datums, adapter)
                signal = SignalBatch.of(batch, datums, scales, reference, device=self._device)
                loss, metrics = objective(logprobs_M, signal)
                loss.backward()
            _scatter(logprobs_M.detach(), batch, logprobs)
            loss_sum += loss.item()
            sums.append({name: value.detach() for name, value in metrics.items()})
        return ForwardBackward(loss_sum, finalize_metrics(combine_metrics(sums)), logprobs)

    def optim_step(self, policy: str, config: OptimizerConfig) -> dict[str, float]:
        """One AdamW step of `policy` with its accumulated gradients, which are cleared."""
        return {"grad_norm": self._state(policy).apply_gradients(config)}

    def _state(self, policy: str) -> PolicyState:
        if policy not in self._policies:
            raise UsageError(
                f"policy: {policy!r} has no resident state; accepted: {', '.join(self._policies) or 'none'}"
            )
        return self._policies[policy]

    def _micro_batches(self, datums: Sequence[Datum]) -> Iterator[MicroBatch]:
        _check_one_shape(datums)
        layout = self.layout
        return micro_batches(
            datums, layout.micro_batch_tokens, share_prefix=layout.share_prefix, pack=layout.pack
        )

    def _logprobs(self, batch: MicroBatch, datums: Sequence[Datum], adapter: Adapter | None) -> Tensor:
        """Logprobs (M,) of the weighted targets; logits exist at these positions only."""
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(batch.tokens_BT).to(self._device)}
        if batch.attention_BTT is not None:
            inputs["attention_mask"] = torch.from_numpy(batch.attention_BTT).to(self._device)[:, None]
            inputs["position_ids"] = torch.from_numpy(batch.positions_BT).to(self._device)
        hidden_BTD = self._decoder.hidden(**inputs, use_cache=False)
        rows = torch.from_numpy(batch.row_M).to(self._device)
        hidden_MD = hidden_BTD[rows, torch.from_numpy(batch.column_M).to(self._device)]
        all_targets = batch.gather([datum.target_tokens_N for datum in datums])
        targets_M = torch.from_numpy(all_targets).to(self._device)
        shape = datums[0]
        chunks = zip(hidden_MD.split(_HEAD_CHUNK), targets_M.split(_HEAD_CHUNK), strict=True)
        return torch.cat([self._head(hidden, targets, shape, adapter) for hidden, targets in chunks])

    def _head(self, hidden_MD: Tensor, targets_M: Tensor, shape: Datum, adapter: Adapter | None) -> Tensor:
        def logprobs(hidden: Tensor) -> Tensor:
            logits_MV = self._decoder.logits(hidden)
            return (
                log_distribution(logits_MV, shape, keep_M=targets_M).gather(1, targets_M[:, None]).squeeze(1)
            )

        if not torch.is_grad_enabled() or len(hidden_MD) < _HEAD_CHUNK:
            return logprobs(hidden_MD)
        # The logits of a full chunk are recomputed in the backward pass instead of kept.
        return checkpoint(
            logprobs, hidden_MD, use_reentrant=False, context_fn=lambda: (nullcontext(), applied(adapter))
        )


def _check_one_shape(datums: Sequence[Datum]) -> None:
    """All logprobs of a call are those of one sampled distribution."""
    for name in ("temperature", "top_p", "top_k"):
        for index, datum in enumerate(datums):
            first, other = getattr(datums[0], name), getattr(datum, name)
            if other != first:
                raise UsageError(
                    f"datums[{index}].{name}: {other!r} is not accepted; "
                    f"accepted: {first!r} as in datums[0], the same for all datums of a call"
                )


def _scatter(logprobs_M: Tensor, batch: MicroBatch, out: list[np.ndarray]) -> None:
    """Put each weighted position's logprob back to its datum's array."""
    for d, n, value in zip(batch.datum_M, batch.position_M, logprobs_M.float().cpu().tolist(), strict=True):
        out[d][n] = value
