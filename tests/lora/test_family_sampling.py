"""Each supported architecture samples, in mixed batches, from what the trainer computes."""

from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.sampling.protocol import SampleRequest, SamplingParams
from opentinker_core.trajectories.types import Datum
from tests.lora.families import CONFIGS, SIZES, Family

POLICIES = {
    "all": LoRAConfig(rank=4, alpha=8.0),
    "some": LoRAConfig(rank=9, alpha=3.0, target_modules=("o_proj", "down_proj", "lm_head")),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_sampled_logprobs_are_the_trainers_for_prompts_of_any_lengths(
    name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    family = Family.of(CONFIGS[name])
    trainer = family.trainer
    sampler = NativeSampler(
        trainer._decoder, trainer._pool, tokenizer, lambda uri, _: Path(uri), trainer.read_adapter
    )
    for seed, (policy, lora) in enumerate(POLICIES.items()):
        family.random_policy(policy, lora, seed)
        sampler.refresh(policy, str(family.publish(policy, tmp_path / policy)), policy)
    generator = np.random.default_rng(0)
    requests = [
        SampleRequest(
            tuple(generator.integers(3, SIZES["vocab_size"], length).tolist()),
            SamplingParams(max_tokens=9),
            policy,
            (1, 2),
        )
        for length, policy in zip((3, 12, 7, 7), [*POLICIES, *POLICIES], strict=True)
    ]
    for request, sequences in zip(requests, sampler.sample(requests), strict=True):
        for sequence in sequences:
            tokens = np.array([*request.prompt_tokens, *sequence.tokens])
            mask_N = np.arange(len(tokens) - 1) >= len(request.prompt_tokens) - 1
            datum = Datum(tokens[:-1], tokens[1:], mask_N, weights_N=mask_N.astype(np.float32))
            logprobs_N = trainer.forward(request.version, [datum])[0]
            np.testing.assert_allclose(sequence.logprobs, logprobs_N[mask_N], atol=1e-4)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = {str(token): token for token in range(SIZES["vocab_size"])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")))
