"""Each supported architecture computes, fused, what PEFT computes of each adapter alone."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.objectives.cross_entropy import cross_entropy
from opentinker_core.training.trainer import PolicyBatch
from opentinker_core.trajectories.types import Datum
from tests.lora.families import CONFIGS, Family, random_datums

POLICIES = {
    "all": LoRAConfig(rank=4, alpha=8.0),
    "some": LoRAConfig(rank=9, alpha=3.0, target_modules=("o_proj", "down_proj", "lm_head"), use_rslora=True),
}
DATUMS = {"all": random_datums((13, 4, 17), seed=1), "some": random_datums((9, 17), seed=2)}


@pytest.fixture(scope="module", params=CONFIGS)
def family(request: pytest.FixtureRequest) -> Family:
    family = Family.of(CONFIGS[request.param])
    for seed, (policy, lora) in enumerate(POLICIES.items()):
        family.random_policy(policy, lora, seed)
    return family


def _peft(family: Family, policy: str, directory: Path, datums: list[Datum]) -> tuple[list, dict]:
    """Logprobs of the datums, and the gradients of their weighted sum by PEFT's names."""
    model = PeftModel.from_pretrained(
        deepcopy(family.plain), family.publish(policy, directory / policy), is_trainable=True
    ).eval()
    logprobs = []
    for datum in datums:
        logits_TV = model(torch.tensor(datum.input_tokens_N)[None]).logits[0]
        targets_T = torch.tensor(datum.target_tokens_N)
        logprobs.append(logits_TV.log_softmax(-1).gather(1, targets_T[:, None])[:, 0])
    loss = -sum((torch.tensor(d.weights_N) * own).sum() for d, own in zip(datums, logprobs, strict=True))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [own.detach().numpy() for own in logprobs], gradients


def test_a_fused_pass_gives_each_policy_what_peft_gives_it_alone(family: Family, tmp_path: Path) -> None:
    batches = [
        PolicyBatch(policy, datums, cross_entropy, [np.ones(len(d), np.float32) for d in datums])
        for policy, datums in DATUMS.items()
    ]
    for batch, result in zip(batches, family.trainer.forward_backward_all(batches), strict=True):
        assert not isinstance(result, Exception)
        logprobs, gradients = _peft(family, batch.policy, tmp_path, list(batch.datums))
        for ours, theirs in zip(result.logprobs, logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-5)
        factors_of = family.gradient(batch.policy).factors
        assert 2 * len(factors_of) == len(gradients)
        for name, factors in factors_of.items():
            start = f"base_model.model.{name}.lora_"
            torch.testing.assert_close(
                factors.A_RK, gradients[f"{start}A.default.weight"], atol=1e-4, rtol=1e-4
            )
            torch.testing.assert_close(
                factors.Bt_RN, gradients[f"{start}B.default.weight"].T, atol=1e-4, rtol=1e-4
            )


def test_the_base_model_stays_what_it_was(family: Family) -> None:
    plain = dict(family.plain.named_parameters())
    for name, parameter in family.model.named_parameters():
        assert torch.equal(parameter, plain[name.replace(".base.", ".")])
    for ours, datum in zip(family.trainer.forward(None, DATUMS["all"]), DATUMS["all"], strict=True):
        with torch.no_grad():
            logits_TV = family.plain(torch.tensor(datum.input_tokens_N)[None]).logits[0]
        targets_T = torch.tensor(datum.target_tokens_N)
        theirs = logits_TV.log_softmax(-1).gather(1, targets_T[:, None])[:, 0].numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-5)
