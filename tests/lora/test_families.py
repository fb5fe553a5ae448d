"""Each supported architecture computes, fused, what PEFT computes of each adapter alone."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from opentinker_core.config.schema import LoRAConfig, OptimizerConfig
from opentinker_core.errors import UsageError
from opentinker_core.lora.merge import merge
from opentinker_core.models.decoder import ARCHITECTURES, Decoder
from opentinker_core.objectives.cross_entropy import cross_entropy
from opentinker_core.training.trainer import LayoutSettings, PolicyBatch
from opentinker_core.trajectories.types import Datum
from tests.lora.families import CONFIGS, SIZES, Family, random_datums, random_model

POLICIES = {
    "all": LoRAConfig(rank=4, alpha=8.0),
    "some": LoRAConfig(rank=9, alpha=3.0, target_modules=("o_proj", "down_proj", "lm_head"), use_rslora=True),
}
ROPE = {"rope_theta": 10_000.0, "factor": 2.0}
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


def _unsupported(kind: type[PretrainedConfig], **more: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(kind(**(SIZES | more)))


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
UNSUPPORTED: dict[str, Callable[[], PreTrainedModel]] = {
    "GPT2LMHeadModel": lambda: AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2)
    ),
    "MambaForCausalLM": lambda: _unsupported(MambaConfig, num_hidden_layers=1),
    "Qwen3MoeForCausalLM": lambda: _unsupported(Qwen3MoeConfig, **EXPERTS),
    "GraniteForCausalLM": lambda: _unsupported(GraniteConfig, logits_scaling=4.0),
    "CohereForCausalLM": lambda: _unsupported(CohereConfig, logit_scale=0.1),
    "Gemma2ForCausalLM": lambda: _unsupported(Gemma2Config),
    "T5ForConditionalGeneration": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=61, d_model=32, d_ff=48, num_layers=1, num_heads=2, d_kv=8)
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_architectures_are_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=rf"base_model: the architecture {name} is not.*LlamaForCausalLM"):
        Decoder.of(UNSUPPORTED[name]())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(**SIZES, rope_parameters=ROPE | {"rope_type": "dynamic"}), "rope_type 'dynamic'"),
        (
            Gemma3TextConfig(
                **SIZES,
                rope_parameters={
                    "sliding_attention": ROPE | {"rope_type": "default"},
                    "full_attention": ROPE | {"rope_type": "dynamic"},
                },
            ),
            "rope_type 'dynamic'",
        ),
        (Gemma3TextConfig(**SIZES, attn_logit_softcapping=50.0), r"attn_logit_softcapping 50\.0"),
        (Gemma3TextConfig(**SIZES, use_bidirectional_attention=True), "use_bidirectional_attention True"),
    ],
)
def test_what_a_config_asks_for_and_is_not_supported_is_named(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(UsageError, match=f"base_model: {message} is not supported.*accepted: "):
        Decoder.of(random_model(config))


def test_every_accepted_architecture_is_tested() -> None:
    tested = {type(AutoModelForCausalLM.from_config(config)).__name__ for config in CONFIGS.values()}
    assert tested == set(ARCHITECTURES)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_window_counts_positions_however_rows_are_laid_out(name: str) -> None:
    family = Family.of(CONFIGS[name])
    family.random_policy("p", POLICIES["all"])
    datums = _with_a_common_start(random_datums((14, 9, 17)))
    family.trainer.layout = LayoutSettings(share_prefix=False)
    plain = family.trainer.forward("p", datums)
    for layout in (LayoutSettings(share_prefix=True), LayoutSettings(pack=True)):
        family.trainer.layout = layout
        for ours, theirs in zip(family.trainer.forward("p", datums), plain, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5)


def _with_a_common_start(datums: list[Datum]) -> list[Datum]:
    """The same datums, but the first seven tokens of all are those of the first, and carry no weight."""
    start = datums[0].input_tokens_N[:7]
    changed = []
    for datum in datums:
        tokens_N = np.concatenate([start, datum.input_tokens_N[7:], datum.target_tokens_N[-1:]])
        mask_N = np.arange(len(datum)) >= 6
        weights_N = datum.weights_N * mask_N
        changed.append(
            replace(
                datum,
                input_tokens_N=tokens_N[:-1],
                target_tokens_N=tokens_N[1:],
                mask_N=mask_N,
                weights_N=weights_N,
            )
        )
    return changed


def test_a_tied_head_has_its_own_adapter_and_leaves_the_embedding_alone(tmp_path: Path) -> None:
    family = Family.of(CONFIGS["qwen2-tied"])
    embedding, head = family.model.get_input_embeddings().weight, family.model.lm_head.weight
    assert embedding is head
    before = embedding.clone()
    family.random_policy("head", LoRAConfig(rank=4, target_modules=("lm_head",)))
    datums = DATUMS["all"]
    ours = family.trainer.forward("head", datums)
    for own, theirs in zip(ours, _peft(family, "head", tmp_path, datums)[0], strict=True):
        np.testing.assert_allclose(own, theirs, atol=1e-5)
    batch = PolicyBatch("head", datums, cross_entropy, [np.ones(len(d), np.float32) for d in datums])
    family.trainer.forward_backward_all([batch])
    family.trainer.optim_step("head", OptimizerConfig(learning_rate=0.1))
    assert (
        max(abs(a - b).max() for a, b in zip(family.trainer.forward("head", datums), ours, strict=True)) > 0.1
    )
    assert torch.equal(embedding, before)
    merged = deepcopy(family.plain)
    merge(merged, family.adapter("head"))
    assert torch.equal(merged.get_input_embeddings().weight, before)
    assert not torch.equal(merged.lm_head.weight, before)
