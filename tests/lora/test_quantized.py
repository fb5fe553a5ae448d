"""Adapters over linear layers that are no `nn.Linear`: any module with in_features and out_features."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import OpenTinkerError
from opentinker_core.lora.layer import linear_shapes
from opentinker_core.lora.merge import merge
from opentinker_core.objectives.cross_entropy import cross_entropy
from opentinker_core.training.trainer import PolicyBatch
from tests.lora.families import CONFIGS, Family, random_datums, random_model

POLICIES = {
    "all": LoRAConfig(rank=4, alpha=8.0),
    "some": LoRAConfig(rank=9, target_modules=("k_proj", "down_proj", "lm_head")),
}
DATUMS = {"all": random_datums((13, 4), seed=1), "some": random_datums((9,), seed=2)}


class Int8Linear(nn.Module):
    """Weights of 8 bits with one scale an output feature, dequantized in the forward pass."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight_NK = linear.weight.detach()
        self.scale_N1 = nn.Parameter(weight_NK.abs().amax(1, keepdim=True) / 127, requires_grad=False)
        self.weight = nn.Parameter((weight_NK / self.scale_N1).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def dequantized(self) -> nn.Linear:
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        linear.weight = nn.Parameter(self.weight * self.scale_N1)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone())
        return linear

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.scale_N1, self.bias)


class ViewingInt8Linear(Int8Linear):
    """Gives a view of a larger tensor, as libraries do that pad their outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(super().forward(x), (0, 3))[..., : self.out_features]


class ForwardOnlyInt8Linear(Int8Linear):
    """Has no backward pass, like the dynamically quantized layers of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


def _with_linears(make: type[Int8Linear], *, dequantize: bool = False) -> PreTrainedModel:
    model = random_model(CONFIGS["qwen2"])
    for name in linear_shapes(model):
        quantized = make(model.get_submodule(name))  # type: ignore[arg-type]
        model.set_submodule(name, quantized.dequantized() if dequantize else quantized)
    return model


def _family(model: PreTrainedModel) -> Family:
    family = Family.around(model)
    for seed, (policy, lora) in enumerate(POLICIES.items()):
        family.random_policy(policy, lora, seed)
    return family


def _batches() -> list[PolicyBatch]:
    return [
        PolicyBatch(policy, datums, cross_entropy, [np.ones(len(d), np.float32) for d in datums])
        for policy, datums in DATUMS.items()
    ]


@pytest.mark.parametrize("make", [Int8Linear, ViewingInt8Linear])
def test_logprobs_and_gradients_are_those_over_the_dequantized_layers(make: type[Int8Linear]) -> None:
    quantized, reference = _family(_with_linears(make)), _family(_with_linears(make, dequantize=True))
    results = [family.trainer.forward_backward_all(_batches()) for family in (quantized, reference)]
    for ours, theirs in zip(*results, strict=True):
        assert not isinstance(ours, Exception)
        assert not isinstance(theirs, Exception)
        for own, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(own, other, atol=1e-5)
    for policy, datums in DATUMS.items():
        gradient_P = reference.gradient(policy).row_P
        torch.testing.assert_close(quantized.gradient(policy).row_P, gradient_P, atol=1e-5, rtol=1e-4)
        assert gradient_P.abs().max() > 0.1
        plain = [family.trainer.forward(policy, datums) for family in (quantized, reference)]
        for own, other in zip(*plain, strict=True):
            np.testing.assert_allclose(own, other, atol=1e-5)


def test_frozen_weights_stay_quantized_and_unchanged() -> None:
    model = _with_linears(Int8Linear)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    _family(model).trainer.forward_backward_all(_batches())
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad
        assert torch.equal(parameter, before[name.replace(".base.", ".")])
    assert sum(parameter.dtype == torch.int8 for parameter in model.parameters()) == 15


def test_training_through_a_layer_without_a_backward_pass_raises() -> None:
    family = _family(_with_linears(ForwardOnlyInt8Linear))
    assert np.isfinite(family.trainer.forward("all", DATUMS["all"])[0]).all()
    for outcome in family.trainer.forward_backward_all(_batches()):
        assert isinstance(outcome, OpenTinkerError)
        assert "ForwardOnlyInt8Linear has no backward pass" in str(outcome)


def test_an_adapter_is_not_merged_into_quantized_weights() -> None:
    family = _family(_with_linears(Int8Linear))
    with pytest.raises(OpenTinkerError, match=r"merge: layer '.*q_proj' is a quantized Int8Linear"):
        merge(family.plain, family.adapter("all"))


def test_what_a_layer_is_made_of_is_no_layer_of_its_own() -> None:
    model = nn.ModuleDict({"outer": Int8Linear(nn.Linear(4, 6)), "norm": nn.LayerNorm(4)})
    model["outer"].inner = nn.Linear(4, 2)
    assert linear_shapes(model) == {"outer": (4, 6)}
