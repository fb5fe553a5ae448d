"""The public losses in plain torch, data for them, and a policy computed by PEFT alone.

Axes: N positions of a datum, K targets a position, V vocabulary.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor

from opentinker_core.models.loading import load_model
from opentinker_core.models.source import resolve
from opentinker_core.service.tinker.wire import WireDatum

VOCABULARY = 99
"""Of the tiny model."""
Inputs = Mapping[str, Tensor]
Loss = Callable[[Tensor, Inputs, Mapping[str, float]], Tensor]


def _bounds(x: Inputs, config: Mapping[str, float], low: float, high: float) -> tuple[Tensor, Tensor]:
    ones = torch.ones_like(x["logprobs"])
    low_N = x.get("clip_low_threshold", ones * config.get("clip_low_threshold", low))
    return low_N, x.get("clip_high_threshold", ones * config.get("clip_high_threshold", high))


def _clipped(r: Tensor, x: Inputs, bounds: tuple[Tensor, Tensor]) -> Tensor:
    return -torch.minimum(r * x["advantages"], torch.clamp(r, *bounds) * x["advantages"]).sum()


def _ppo(lp: Tensor, x: Inputs, config: Mapping[str, float]) -> Tensor:
    return _clipped((lp - x["logprobs"]).exp(), x, _bounds(x, config, 0.8, 1.2))


def _cispo(lp: Tensor, x: Inputs, config: Mapping[str, float]) -> Tensor:
    weight = torch.clamp((lp - x["logprobs"]).exp(), *_bounds(x, config, 0.0, 4.0)).detach()
    return -(weight * lp * x["advantages"]).sum()


def _dro(lp: Tensor, x: Inputs, config: Mapping[str, float]) -> Tensor:
    penalty = 0.5 * config.get("beta", 0.05) * (lp - x["logprobs"]) ** 2
    return -(lp * x["advantages"] - penalty).sum()


def _gspo(lp: Tensor, x: Inputs, config: Mapping[str, float]) -> Tensor:
    mask = x["sequence_ratio_mask"]
    s = (mask * (lp.detach() - x["logprobs"])).sum() / mask.sum()
    return _clipped((s + lp - lp.detach()).exp(), x, _bounds(x, config, 0.8, 1.2))


FORMULAS: dict[str, Loss] = {
    "cross_entropy": lambda lp, x, _: -(x["weights"] * lp).sum(),
    "importance_sampling": lambda lp, x, _: -((lp - x["logprobs"]).exp() * x["advantages"]).sum(),
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}
"""By name, the loss of a datum: of its logprobs (N,) or (N, K), its other inputs and the config."""


def data_for(loss_fn: str, seed: int = 0, targets: int | None = None) -> list[WireDatum]:
    """Datums of different lengths, some of which begin alike; logprobs near and far from the policy's."""
    draw = np.random.default_rng(seed)
    start = draw.integers(0, VOCABULARY, 20)
    data = []
    for length in (5, 30, 26, 1, 23):
        tokens = draw.integers(0, VOCABULARY, length)
        tokens[:20] = start[:length]
        shape = (length,) if targets is None else (length, targets)
        inputs = {"target_tokens": draw.integers(0, VOCABULARY, shape)}
        if loss_fn == "cross_entropy":
            weights = draw.normal(size=shape)
            inputs["weights"] = np.where(draw.random(shape) < 0.3, 0, weights)
        else:
            inputs["logprobs"] = draw.normal(-3, 0.7, length)
            inputs["advantages"] = np.where(
                np.arange(length) < min(18, length // 2), 0, draw.normal(size=length)
            )
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = (np.arange(length) >= length // 2).astype(float)
        floats = {n: a.astype(np.float32) for n, a in inputs.items() if n != "target_tokens"}
        data.append(WireDatum(tokens.astype(np.int64), inputs | floats))
    return data


class Alone:
    """A policy by PEFT and torch: a PEFT directory on the tiny model, trainable."""

    def __init__(self, home: Path, directory: Path) -> None:
        """`home`: where the tiny model is made; `directory`: as PEFT reads it."""
        base = load_model(resolve("tiny", home), "cpu", torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.model: PeftModel = PeftModel.from_pretrained(base, directory, is_trainable=True)

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What is trained, by the names that PEFT's files have."""
        return {
            name.replace(".default.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def logprobs(self, tokens_N: np.ndarray, targets: np.ndarray) -> Tensor:
        """Of each position's targets, (N,) or (N, K)."""
        wanted = torch.tensor(targets)
        logits_NV = self.model(input_ids=torch.tensor(tokens_N)[None], use_cache=False).logits[0]
        return logits_NV.log_softmax(-1).gather(1, wanted.reshape(len(wanted), -1)).view(wanted.shape)

    def loss(self, data: Sequence[WireDatum], loss: Loss, config: Mapping[str, float]) -> Tensor:
        """The sum over the datums."""
        total = torch.zeros(())
        for wire in data:
            inputs = {name: torch.tensor(array) for name, array in wire.inputs.items()}
            total = total + loss(self.logprobs(wire.tokens_N, wire.inputs["target_tokens"]), inputs, config)
        return total

    def loss_and_gradients(
        self, data: Sequence[WireDatum], loss: Loss, config: Mapping[str, float]
    ) -> tuple[float, dict[str, Tensor]]:
        """The loss, and the gradient of each parameter that has one."""
        self.model.zero_grad()
        total = self.loss(data, loss, config)
        total.backward()
        gradients = {n: p.grad.clone() for n, p in self.parameters.items() if p.grad is not None}
        return total.item(), gradients
