"""Adapters leave as plain PEFT directories and come back as they were."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.lora.peft_format import CONFIG_FILE, WEIGHTS_FILE, read_peft, write_peft
from opentinker_core.lora.routing import routed
from opentinker_core.lora.rowwise import TILE
from opentinker_core.models.loading import load_model
from opentinker_core.models.source import resolve
from tests.lora.families import CONFIGS, Family, random_datums
from tests.tiny import TinyEngine

LORAS = {
    "some targets": LoRAConfig(rank=4, target_modules=("q_proj", "v_proj", "down_proj", "lm_head")),
    "all-linear": LoRAConfig(rank=3, alpha=5.0),
    "patterns": LoRAConfig(
        rank=4,
        alpha=6.0,
        target_modules=("self_attn.q_proj", "up_proj", "down_proj", "lm_head"),
        rank_pattern={"q_proj": 17, r"layers\.1\.mlp\.down_proj": 1},
        alpha_pattern={".*up_proj": 3.5, "lm_head": 32.0},
    ),
    "rslora": LoRAConfig(rank=9, rank_pattern={"k_proj": 16}, use_rslora=True),
}


@pytest.fixture(scope="module")
def family() -> Family:
    family = Family.of(CONFIGS["llama"])
    for policy, lora in LORAS.items():
        family.random_policy(policy, lora)
    return family


@pytest.fixture(params=LORAS)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_an_exported_directory_computes_the_same_in_peft(family: Family, policy: str, tmp_path: Path) -> None:
    datum = random_datums((15,))[0]
    ours = torch.tensor(family.trainer.forward(policy, [datum])[0])
    loaded = PeftModel.from_pretrained(deepcopy(family.plain), family.publish(policy, tmp_path))
    with torch.no_grad():
        logits_TV = loaded(torch.tensor(datum.input_tokens_N)[None]).logits[0]
        untouched_TV = family.plain(torch.tensor(datum.input_tokens_N)[None]).logits[0]
    targets_T1 = torch.tensor(datum.target_tokens_N)[:, None]
    torch.testing.assert_close(
        ours, logits_TV.log_softmax(-1).gather(1, targets_T1)[:, 0], atol=1e-5, rtol=1e-5
    )
    assert (logits_TV - untouched_TV).abs().max() > 0.1


def test_a_round_trip_is_bitwise(family: Family, policy: str, tmp_path: Path) -> None:
    family.publish(policy, tmp_path / "a")
    again = family.trainer.read_adapter(tmp_path / "a")
    assert again.config == LORAS[policy]
    assert torch.equal(again.row_P, family.adapter(policy).row_P)
    assert again.layout.factors == family.adapter(policy).layout.factors
    write_peft(again, tmp_path / "b", "random")
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_round_trip_through_peft_is_bitwise(family: Family, policy: str, tmp_path: Path) -> None:
    family.publish(policy, tmp_path / "a")
    loaded = PeftModel.from_pretrained(deepcopy(family.plain), tmp_path / "a")
    loaded.save_pretrained(str(tmp_path / "b"))
    again = read_peft(tmp_path / "b", family.trainer._pool.model)
    assert torch.equal(again.row_P, family.adapter(policy).row_P)
    assert again.layout.factors == family.adapter(policy).layout.factors


def test_the_config_is_written_in_pefts_words(family: Family, policy: str, tmp_path: Path) -> None:
    lora = LORAS[policy]
    stored = LoraConfig.from_pretrained(str(family.publish(policy, tmp_path)))
    assert (stored.r, stored.lora_alpha, stored.use_rslora) == (lora.rank, lora.alpha, lora.use_rslora)
    assert (stored.rank_pattern, stored.alpha_pattern) == (lora.rank_pattern, lora.alpha_pattern)
    targets = lora.target_modules
    assert stored.target_modules == (targets if isinstance(targets, str) else set(targets))


def test_every_tensor_has_the_rank_of_its_layer(family: Family, tmp_path: Path) -> None:
    tensors = load_file(family.publish("patterns", tmp_path) / WEIGHTS_FILE)
    ranks = {key: min(tensor.shape) for key, tensor in tensors.items() if ".layers.1." in key}
    assert {key.rpartition(".lora_")[0].rpartition(".")[2]: rank for key, rank in ranks.items()} == {
        "q_proj": 17,
        "up_proj": 4,
        "down_proj": 1,
    }


def test_a_target_that_matches_nothing_is_refused(family: Family) -> None:
    with pytest.raises(UsageError, match=r"target_modules: 'c_attn' matches no linear layer.*q_proj"):
        family.trainer.create("other", LoRAConfig(target_modules=("q_proj", "c_attn")), 0)


def test_a_forward_pass_that_names_no_adapter_raises(family: Family) -> None:
    with pytest.raises(OpenTinkerError, match="without `routed"):
        family.model(torch.tensor([[4, 5, 6]]))


def test_base_stays_bitwise_what_it_was(tiny_home: Path, tmp_path: Path) -> None:
    engine = TinyEngine.open(tiny_home, tmp_path)
    engine.random_policy("p")
    base = load_model(resolve("tiny", tiny_home), "cpu", torch.float32)
    # As many rows as a tile has: where rows are multiplied in tiles, that is what the library does with them.
    ids = torch.tensor([engine.ids("12+34=46\n" * TILE)[:TILE]])
    with torch.no_grad(), routed(None):
        assert torch.equal(engine.model(ids).logits, base(ids).logits)
