import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.models.loading import load_model, load_tokenizer
from opentinker_core.models.source import ModelSource, resolve

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def copy(tiny: ModelSource, tmp_path: Path) -> Path:
    return shutil.copytree(tiny.path, tmp_path / "model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_is_frozen_and_ready(tiny: ModelSource, dtype: torch.dtype) -> None:
    model = load_model(tiny, "cpu", dtype)
    assert not model.training
    assert all(not weight.requires_grad and weight.dtype == dtype for weight in model.parameters())


def test_missing_weights_are_not_replaced_by_random_ones(copy: Path, home: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OpenTinkerError, match=r"no weights for .*layers\.1\.mlp\.up_proj"):
        load_model(resolve(str(copy), home), "cpu", torch.float32)


def test_truncated_weights_give_one_message(copy: Path, home: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(OpenTinkerError, match="cannot be loaded from"):
        load_model(resolve(str(copy), home), "cpu", torch.float32)


def test_weights_of_another_shape_give_one_message(copy: Path, home: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(OpenTinkerError, match="cannot be loaded from"):
        load_model(resolve(str(copy), home), "cpu", torch.float32)


@pytest.mark.parametrize("config", [{"model_type": "no-such-model"}, {}])
def test_unknown_architecture_gives_one_message(config: dict[str, str], copy: Path, home: Path) -> None:
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(OpenTinkerError, match="cannot be loaded from"):
        load_model(resolve(str(copy), home), "cpu", torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2", "architectures": None}, "the architecture GPT2LMHeadModel is not supported"),
        ({"model_type": "mamba"}, "the architecture MambaForCausalLM is not supported"),
        ({"model_type": "t5", "architectures": ["T5Model"]}, "the architecture T5Model is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_before_weights_are_read(
    changes: dict[str, object], message: str, copy: Path, home: Path
) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    (copy / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(UsageError, match=f"policy.base_model: {message}.*accepted: "):
        load_model(resolve(str(copy), home), "cpu", torch.float32)


def test_a_config_need_not_name_the_class_with_a_head(copy: Path, home: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    model = load_model(resolve(str(copy), home), "cpu", torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_code_in_the_directory_is_not_run(copy: Path, home: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "custom", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "code.py").write_text(f"open({str(copy / 'ran')!r}, 'w')")
    with pytest.raises(OpenTinkerError, match="cannot be loaded from"):
        load_model(resolve(str(copy), home), "cpu", torch.float32)
    assert not (copy / "ran").exists()


def test_directory_without_tokenizer_gives_one_message(copy: Path, home: Path) -> None:
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").unlink()
    with pytest.raises(OpenTinkerError, match="cannot be loaded from"):
        load_tokenizer(resolve(str(copy), home))


def test_the_folder_kernels_is_not_taken_for_the_package_of_that_name(tiny: ModelSource) -> None:
    """transformers looks for a package `kernels`; from the checkout's root it finds our folder."""
    code = (
        "import sys, torch; from pathlib import Path; from importlib.util import find_spec; "
        "from transformers import AutoModelForCausalLM; "
        "from transformers.utils import is_kernels_available; "
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1]); "
        "model(torch.tensor([[5, 6]])); spec = find_spec('kernels'); "
        "print(bool(spec and str(Path.cwd() / 'kernels') in map(str, spec.submodule_search_locations)), "
        "is_kernels_available())"
    )
    command = [sys.executable, "-c", code, str(tiny.path)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
