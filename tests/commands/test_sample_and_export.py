"""`opentinker sample` and `opentinker export`: a version as text, as PEFT files, as a whole model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from opentinker_core.commands.export import export
from opentinker_core.commands.sample import sample
from opentinker_core.errors import UsageError
from opentinker_core.runtime.session import RunSession
from tests.runtime.runs import small_config, train

runner = CliRunner()
app = typer.Typer()
app.command("sample")(sample)
app.command("export")(export)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunSession:
    return train(tmp_path_factory.mktemp("home"), small_config())


@pytest.fixture(autouse=True)
def _home(trained: RunSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_HOME", str(trained.workspace.home))


def _json(*arguments: str) -> dict[str, Any]:
    done = runner.invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_sampling_names_the_version_and_repeats_itself(trained: RunSession) -> None:
    first = _json("sample", "adder", "3+4=", "-n", "3", "--max-tokens", "4")
    assert first["version"] == trained.version.ref
    assert len(first["completions"]) == 3
    for completion in first["completions"]:
        assert len(completion["tokens"]) == len(completion["logprobs"]) <= 4
    assert _json("sample", "adder", "3+4=", "-n", "3", "--max-tokens", "4") == first
    other = _json("sample", "adder@0", "3+4=", "-n", "3", "--max-tokens", "4")
    assert other["version"] == "adder@0"
    assert other["completions"] != first["completions"]


def test_the_base_model_can_be_sampled(trained: RunSession) -> None:
    base = _json("sample", "base", "3+4=", "--model", "tiny", "--max-tokens", "4")
    fresh = _json("sample", "adder@0", "3+4=", "--max-tokens", "4")
    assert base["completions"] == fresh["completions"]


def test_an_exported_adapter_is_the_published_one(trained: RunSession, tmp_path: Path) -> None:
    _json("export", "adder", str(tmp_path / "out"))
    published = trained.workspace.snapshots.fetch(trained.version.sampler.uri)
    weights = "adapter_model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (published / weights).read_bytes()


def test_peft_finds_the_base_model_of_an_exported_adapter(trained: RunSession, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    _json("export", "adder", str(tmp_path / "out"))
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.peft_config["default"].r == trained.config.policy.lora.rank


def test_a_merged_model_gives_the_logits_of_base_and_adapter(trained: RunSession, tmp_path: Path) -> None:
    from peft import PeftModel

    _json("export", "adder", str(tmp_path / "merged"), "--merged", "--dtype", "float32")
    assert len({path.stat().st_mode for path in (tmp_path / "merged").iterdir()}) == 1
    _json("export", "adder", str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(trained.engine.source.path, dtype=torch.float32)
    with_adapter = PeftModel.from_pretrained(base, tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ids = torch.tensor([trained.engine.tokenizer.encode("3+4=7", add_special_tokens=False)])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, with_adapter(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sample", "nobody", "x"), "nobody"),
        (("sample", "adder@99", "x"), "adder@99"),
        (("sample", "adder", ""), "PROMPT: empty"),
        (("export", "adder@99", "out"), "adder@99"),
    ],
)
def test_wrong_requests_are_named(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = runner.invoke(app, [a if a != "out" else str(tmp_path / "out") for a in arguments])
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_directory_with_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    done = runner.invoke(app, ["export", "adder", str(tmp_path)])
    assert isinstance(done.exception, UsageError)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
