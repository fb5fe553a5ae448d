"""A policy trained alone by PEFT and torch: the peer whose results fused training must reproduce.

Nothing here goes through this project's layers, objectives or optimizer: one sequence after the
other through transformers and PEFT, losses by their formulas, `torch.optim.AdamW`, `clip_grad_norm_`.

Axes: N positions of a datum, V vocabulary, W weights.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from opentinker_core.evaluation.isolation import Bench, Training, together
from opentinker_core.evaluation.participants import Participant
from opentinker_core.training.trainer import PolicyBatch
from opentinker_core.trajectories.types import Datum


class Solo:
    """One policy, alone."""

    def __init__(self, base: PreTrainedModel, directory: Path, participant: Participant) -> None:
        """Start from the adapter in the PEFT `directory`; `base` is changed until `close`."""
        self._participant = participant
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT's use of a name that transformers changes
            self._model: PeftModel = PeftModel.from_pretrained(base, directory, is_trainable=True)
        self.weights = {
            name.replace(".default.", "."): parameter
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }
        """The factors, by the names that PEFT's files give them."""
        config = participant.optimizer
        self._optimizer = torch.optim.AdamW(
            self.weights.values(),
            config.learning_rate,
            (config.beta1, config.beta2),
            config.eps,
            config.weight_decay,
        )

    def step(self, batch: PolicyBatch) -> float:
        """One optimizer step; returns the loss before it."""
        total = 0.0
        for datum, scale_N in zip(batch.datums, batch.scales, strict=True):
            loss = self._loss(datum, scale_N)
            loss.backward()
            total += loss.item()
        if self._participant.optimizer.grad_clip_norm:
            nn.utils.clip_grad_norm_(self.weights.values(), self._participant.optimizer.grad_clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    def close(self) -> None:
        """Take the adapter off the base model."""
        self._model.unload()

    def _logprobs(self, datum: Datum) -> Tensor:
        device = self._model.device
        targets_N = torch.tensor(datum.target_tokens_N, device=device)
        tokens_1N = torch.tensor(datum.input_tokens_N, device=device)[None]
        z_NV = self._model(input_ids=tokens_1N, use_cache=False).logits[0].float() / datum.temperature
        if datum.top_k:
            least_N1 = z_NV.topk(datum.top_k).values[:, -1:]
            own_NV = nn.functional.one_hot(targets_N, z_NV.shape[-1]).bool()
            z_NV = z_NV.masked_fill((z_NV < least_N1) & ~own_NV, float("-inf"))
        return z_NV.log_softmax(-1).gather(1, targets_N[:, None])[:, 0]

    def _loss(self, datum: Datum, scale_N: np.ndarray) -> Tensor:
        """Over the trained positions: the sum of each one's loss times its scale."""
        at = torch.from_numpy(np.flatnonzero(datum.mask_N)).to(self._model.device)

        def trained(array_N: np.ndarray | None) -> Tensor:
            assert array_N is not None
            return torch.tensor(array_N, device=at.device)[at]

        logp, objective = self._logprobs(datum)[at], self._participant.objective
        if objective is None:
            return -(trained(datum.weights_N) * logp * trained(scale_N)).sum()
        advantage = trained(datum.advantages_N)
        ratio = (logp - trained(datum.sampler_logprobs_N)).exp()
        loss = -ratio * advantage
        if objective.name == "ppo":
            clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
            loss = -torch.minimum(ratio * advantage, clipped * advantage)
        if objective.kl_coefficient:
            with torch.no_grad(), self._model.disable_adapter():
                difference = logp - self._logprobs(datum)[at]
            loss = loss + objective.kl_coefficient * _kl(logp, difference)
        return (loss * trained(scale_N)).sum()


def _kl(logp: Tensor, difference: Tensor) -> Tensor:
    """KL to the base by token: the value of k3 = exp(-d) - 1 + d, the gradient d * grad log p of k2."""
    return (-difference).exp() - 1 + difference + difference * (logp - logp.detach())


@dataclass(frozen=True)
class Deviation:
    """How far fused training of a policy is from training it alone."""

    policy: str
    losses: tuple[float, ...]
    """|fused - alone| / |alone| of each step's loss."""
    weights: float
    """|fused - alone| / |alone| of all factors after the last step (2-norms)."""

    @property
    def loss(self) -> float:
        """The largest."""
        return max(self.losses)


def deviations(
    bench: Bench,
    base: PreTrainedModel,
    participants: Sequence[Participant],
    steps: int,
    scratch: Path,
    started: Callable[[str], None] = lambda _: None,
) -> list[Deviation]:
    """Train the participants fused, then each alone from the same start, and compare.

    Args:
        base: the base model as transformers gives it, in the number format of the bench's.
        scratch: an empty directory.
        started: is told each policy that is trained alone.
    """
    training = Training(bench.trainer(), participants)
    for participant in participants:
        training.trainer.publish_snapshot(participant.name, scratch / participant.name)
    for step in range(steps):
        together(training, [bench.batch(participant, step) for participant in participants])
    found = []
    for participant in participants:
        started(f"{participant.name} alone")
        solo = Solo(base, scratch / participant.name, participant)
        losses = [solo.step(bench.batch(participant, step)) for step in range(steps)]
        fused = training.losses[participant.name]
        apart = [abs(a - b) / abs(b) for a, b in zip(fused, losses, strict=True)]
        weights = _distance(training, participant.name, solo.weights)
        found.append(Deviation(participant.name, tuple(apart), weights))
        solo.close()
    return found


def _distance(training: Training, policy: str, alone: Mapping[str, Tensor]) -> float:
    fused = {}
    for name, factors in training.trainer.state_of(policy).adapter.factors.items():
        fused[f"base_model.model.{name}.lora_A.weight"] = factors.A_RK
        fused[f"base_model.model.{name}.lora_B.weight"] = factors.Bt_RN.T
    if fused.keys() != alone.keys():
        raise ValueError(f"{policy}: PEFT trained {sorted(alone)}, the fused trainer {sorted(fused)}")
    fused_W, alone_W = (
        torch.cat([weights[name].detach().double().reshape(-1) for name in sorted(fused)])
        for weights in (fused, alone)
    )
    return float((fused_W - alone_W).norm() / alone_W.norm())
