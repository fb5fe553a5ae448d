import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from envs.protocol import Action, Observation
from opentinker_core.models.loading import load_model
from opentinker_core.models.renderer import Renderer
from opentinker_core.models.source import ModelSource, resolve

DIGEST = "6047a99549ca20ea31cc2376f71588de933d2b0066b34451075dee7e2603989f"
PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n"))
SPECIAL = ("<pad>", "<eos>", "<unk>")


def test_every_build_gives_the_same_bytes(tiny: ModelSource, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from opentinker_core.models.source import resolve; "
        "print(resolve('tiny', Path(sys.argv[1])).digest)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    other = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert other == tiny.digest == DIGEST


def test_shape_is_the_documented_one(tiny: ModelSource) -> None:
    model: Any = load_model(tiny, "cpu", torch.float32)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 64, 4)
    assert config.max_position_embeddings == 512
    assert model.get_output_embeddings().weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()


@settings(deadline=None)
@given(text=PRINTABLE.filter(lambda text: not any(token in text for token in SPECIAL)))
def test_one_token_a_character_there_and_back(tiny_tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    tokens = tiny_tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) == len(text)
    assert tiny_tokenizer.decode(tokens) == text
    assert not set(tokens) & set(tiny_tokenizer.all_special_ids)


def test_a_character_outside_the_vocabulary_is_one_unknown_token(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert tiny_tokenizer.encode("é", add_special_tokens=False) == [tiny_tokenizer.unk_token_id]


def test_eos_and_pad_differ(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    assert tiny_tokenizer.eos_token_id != tiny_tokenizer.pad_token_id


def test_tokenizer_survives_saving(tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tiny_tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "2+3=\n~ x"
    assert again.encode(text) == tiny_tokenizer.encode(text)
    assert again.decode(again.encode(text)) == text
    assert (again.eos_token_id, again.pad_token_id) == (
        tiny_tokenizer.eos_token_id,
        tiny_tokenizer.pad_token_id,
    )
    assert again.chat_template == tiny_tokenizer.chat_template


@pytest.mark.learning
@pytest.mark.parametrize("seed", [0, 1])
def test_a_lora_on_all_linears_and_head_learns_sums(
    tiny: ModelSource, tiny_tokenizer: PreTrainedTokenizerBase, seed: int
) -> None:
    """Greedy accuracy on all one-digit sums, from nothing to most of them in a few seconds."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=linears)
    model = peft.get_peft_model(load_model(tiny, "cpu", torch.float32), lora)
    renderer = Renderer(tiny_tokenizer, "plain")
    prompts_BT = torch.tensor([_prompt(renderer, a, b) for a in range(10) for b in range(10)])
    answers = [renderer.demonstration(Action(str(a + b))) for a in range(10) for b in range(10)]
    answers_BT = torch.tensor([answer + [-100] * (3 - len(answer)) for answer in answers])
    tokens_BT = torch.cat([prompts_BT, answers_BT.clamp(min=0)], dim=1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0)

    def logits(rows: torch.Tensor) -> torch.Tensor:
        return model(tokens_BT[rows]).logits[:, prompts_BT.shape[1] - 1 : -1]

    def accuracy() -> float:
        with torch.no_grad():
            right = (logits(torch.arange(100)).argmax(-1) == answers_BT) | (answers_BT == -100)
        return right.all(-1).float().mean().item()

    assert accuracy() < 0.1
    for _ in range(100):
        rows = torch.randint(100, (64,))
        loss = torch.nn.functional.cross_entropy(logits(rows).flatten(0, 1), answers_BT[rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert accuracy() > 0.8


def _prompt(renderer: Renderer, a: int, b: int) -> list[int]:
    return renderer.initial(Observation.user(f"{a}+{b}="))


def test_bundled_name_wins_over_a_directory_of_that_name(
    tiny: ModelSource, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("tiny", home) == tiny
