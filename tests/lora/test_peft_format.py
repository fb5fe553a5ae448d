"""Adapters leave as plain PEFT directories and come back as they were."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.lora.routing import routed
from opentinker_core.models.loading import load_model
from opentinker_core.models.source import resolve
from tests.tiny import LORA, TinyEngine


@pytest.fixture
def engine(tiny_home: Path, tmp_path: Path) -> TinyEngine:
    engine = TinyEngine.open(tiny_home, tmp_path)
    engine.random_policy("p")
    return engine


def _logits(engine: TinyEngine, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), engine.applied("p", ids.numel()):
        return engine.model(ids).logits


@pytest.mark.parametrize("targets", [LORA.target_modules, "all-linear"])
def test_exported_directory_gives_the_same_logits_in_peft(
    engine: TinyEngine, tiny_home: Path, tmp_path: Path, targets: tuple[str, ...] | str
) -> None:
    engine.random_policy("p", lora=LoRAConfig(rank=3, alpha=5.0, target_modules=targets))
    engine.trainer.publish_snapshot("p", tmp_path / "adapter")
    base = load_model(resolve("tiny", tiny_home), "cpu", torch.float32)
    ids = torch.tensor([engine.ids("12+34=46\n")])
    with torch.no_grad():
        untouched = base(ids).logits
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
    ours = _logits(engine, ids)
    torch.testing.assert_close(ours, loaded, atol=1e-5, rtol=1e-5)
    assert (ours - untouched).abs().max() > 0.1


def test_round_trip_is_bitwise(engine: TinyEngine, tmp_path: Path) -> None:
    engine.trainer.publish_snapshot("p", tmp_path / "a")
    again = engine.trainer.read_adapter(tmp_path / "a")
    ours = dict(engine.state("p").adapter.parameters())
    for name, tensor in again.parameters():
        assert torch.equal(tensor, ours[name])


def test_bytes_depend_on_the_weights_only(engine: TinyEngine, tmp_path: Path) -> None:
    for name in ("a", "b"):
        engine.trainer.publish_snapshot("p", tmp_path / name)
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


@pytest.mark.parametrize(
    ("field", "value"),
    [("use_dora", True), ("bias", "all"), ("modules_to_save", ["lm_head"]), ("rank_pattern", {"q": 4})],
)
def test_unsupported_features_are_refused_by_name(
    engine: TinyEngine, tmp_path: Path, field: str, value: object
) -> None:
    engine.trainer.publish_snapshot("p", tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(OpenTinkerError, match=field):
        engine.trainer.read_adapter(tmp_path / "a")


def test_a_target_that_matches_nothing_is_refused(engine: TinyEngine) -> None:
    with pytest.raises(UsageError, match=r"target_modules: 'c_attn' matches no linear layer.*q_proj"):
        engine.trainer.create("other", LoRAConfig(target_modules=("q_proj", "c_attn")), 0)


def test_a_forward_pass_that_names_no_adapter_raises(engine: TinyEngine) -> None:
    with pytest.raises(OpenTinkerError, match="without `routed"):
        engine.model(torch.tensor([engine.ids("1+1=")]))


def test_base_stays_bitwise_what_it_was(engine: TinyEngine, tiny_home: Path) -> None:
    base = load_model(resolve("tiny", tiny_home), "cpu", torch.float32)
    ids = torch.tensor([engine.ids("12+34=46\n")])
    with torch.no_grad(), routed(None):
        assert torch.equal(engine.model(ids).logits, base(ids).logits)
