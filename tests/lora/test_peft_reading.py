"""Directories that PEFT wrote are read faithfully; what is not supported or broken is refused by name."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import OpenTinkerError
from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.layout import ModelLayout
from opentinker_core.lora.peft_format import CONFIG_FILE, WEIGHTS_FILE, read_peft
from tests.lora.families import CONFIGS, Family

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def family() -> Family:
    return Family.of(CONFIGS["llama"])


@pytest.fixture(scope="module")
def tied() -> Family:
    return Family.of(CONFIGS["qwen2-tied"])


@pytest.fixture(scope="module")
def layout(family: Family) -> ModelLayout:
    return family.trainer._pool.model


def _write(family: Family, directory: Path, dtype: torch.dtype = torch.float32, **config: Any) -> dict:
    """A directory as PEFT saves it, and the factors in it by layer name: A, B and the scaling."""
    model = get_peft_model(deepcopy(family.plain), LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
                parameter.data = parameter.data.to(dtype)
    model.save_pretrained(str(directory))
    return {
        name.removeprefix("base_model.model."): (
            module.lora_A["default"].weight.float(),
            module.lora_B["default"].weight.float(),
            module.scaling["default"],
        )
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }


def _assert_same(adapter: Adapter, factors: dict) -> None:
    assert adapter.factors.keys() == factors.keys()
    for name, (A_RK, B_NR, scaling) in factors.items():
        assert torch.equal(adapter.factors[name].A_RK, A_RK)
        assert torch.equal(adapter.factors[name].Bt_RN.T, B_NR)
        assert adapter.factors[name].scaling == pytest.approx(scaling, rel=1e-12)


WRITTEN: dict[str, tuple[dict[str, Any], LoRAConfig]] = {
    "suffixes": (
        {"r": 4, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.1},
        LoRAConfig(rank=4, alpha=7.0, target_modules=("q_proj", "down_proj")),
    ),
    "all-linear": (
        {"r": 2, "lora_alpha": 2, "target_modules": "all-linear"},
        LoRAConfig(rank=2, alpha=2.0, target_modules=LINEARS),
    ),
    "regex": (
        {"r": 2, "lora_alpha": 2, "target_modules": r".*layers\.1\..*(q|v)_proj"},
        LoRAConfig(
            rank=2,
            alpha=2.0,
            target_modules=("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"),
        ),
    ),
    "patterns": (
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "up_proj", "lm_head"],
            "rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.up_proj": 2},
            "alpha_pattern": {"lm_head": 3},
        },
        LoRAConfig(
            rank=4,
            alpha=8.0,
            target_modules=("q_proj", "up_proj", "lm_head"),
            rank_pattern={"q_proj": 7, r"layers\.1\.mlp\.up_proj": 2},
            alpha_pattern={"lm_head": 3.0},
        ),
    ),
    "rslora": (
        {"r": 6, "lora_alpha": 5, "target_modules": ["o_proj"], "use_rslora": True},
        LoRAConfig(rank=6, alpha=5.0, target_modules=("o_proj",), use_rslora=True),
    ),
    "gaussian": (
        {"r": 3, "lora_alpha": 5, "target_modules": ["o_proj"], "init_lora_weights": "gaussian"},
        LoRAConfig(rank=3, alpha=5.0, target_modules=("o_proj",)),
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_peft_wrote_is_read_as_it_is(
    family: Family, layout: ModelLayout, tmp_path: Path, name: str
) -> None:
    config, expected = WRITTEN[name]
    factors = _write(family, tmp_path, **config)
    adapter = read_peft(tmp_path, layout)
    _assert_same(adapter, factors)
    read = adapter.config.model_copy(update={"target_modules": expected.target_modules})
    assert read == expected
    if name != "all-linear":  # PEFT spells it out, in one of several ways
        assert set(adapter.config.target_modules) == set(expected.target_modules)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_of_16_bits_become_float32(
    family: Family, layout: ModelLayout, tmp_path: Path, dtype: torch.dtype
) -> None:
    factors = _write(family, tmp_path, dtype, r=4, target_modules=["q_proj"])
    assert {tensor.dtype for tensor in load_file(tmp_path / WEIGHTS_FILE).values()} == {dtype}
    adapter = read_peft(tmp_path, layout)
    assert adapter.row_P.dtype == torch.float32
    _assert_same(adapter, factors)


@pytest.mark.parametrize("which", ["family", "tied"])
def test_a_copy_of_the_head_beside_its_factors_is_compared_with_the_base_model(
    request: pytest.FixtureRequest, tmp_path: Path, which: str
) -> None:
    family: Family = request.getfixturevalue(which)
    factors = _write(family, tmp_path, r=4, target_modules=["q_proj", "lm_head"])
    copy = "base_model.model.lm_head.base_layer.weight"
    assert copy in load_file(tmp_path / WEIGHTS_FILE)
    _assert_same(read_peft(tmp_path, family.trainer._pool.model), factors)
    _change_tensors(tmp_path, lambda tensors: tensors | {copy: tensors[copy] * 1.5})
    with pytest.raises(OpenTinkerError, match=rf"{copy}' is not the base model's weight"):
        read_peft(tmp_path, family.trainer._pool.model)


def _change_config(directory: Path, **values: Any) -> None:
    path = directory / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = directory / WEIGHTS_FILE
    save_file({key: x.contiguous() for key, x in change(load_file(path)).items()}, path)


@pytest.fixture(scope="module")
def pristine(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pristine")
    _write(family, directory, r=4, target_modules=["q_proj", "down_proj"])
    return directory


@pytest.fixture
def written(pristine: Path, tmp_path: Path) -> Path:
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        (tmp_path / file).write_bytes((pristine / file).read_bytes())
    return tmp_path


REFUSED: list[tuple[str, object]] = [
    ("peft_type", "LOHA"),
    ("use_dora", True),
    ("bias", "all"),
    ("bias", "lora_only"),
    ("lora_bias", True),
    ("modules_to_save", ["lm_head"]),
    ("fan_in_fan_out", True),
    ("layers_to_transform", 0),
    ("layers_to_transform", [1]),
    ("exclude_modules", ["q_proj"]),
    ("init_lora_weights", "pissa"),
    ("init_lora_weights", "pissa_niter_4"),
    ("init_lora_weights", "olora"),
    ("init_lora_weights", "loftq"),
    ("init_lora_weights", "corda"),
    ("init_lora_weights", ["gaussian"]),
    ("layer_replication", [[0, 2]]),
    ("target_parameters", ["mlp.experts"]),
    ("trainable_token_indices", [3]),
    ("use_qalora", True),
    ("alora_invocation_tokens", [1, 2]),
    ("a_feature_of_tomorrow", {"on": True}),
    ("target_modules", None),
    ("target_modules", []),
    ("target_modules", "no_such_.*"),
    ("target_modules", "("),
    ("target_modules", ["q_proj", "down_proj", "c_attn"]),
    ("target_modules", ["q_proj", "down_proj", "embed_tokens"]),
    ("r", None),
    ("r", 0),
    ("r", "many"),
    ("lora_alpha", -1),
    ("lora_alpha", float("nan")),
    ("use_rslora", "perhaps"),
    ("rank_pattern", {"o_proj": 4}),
    ("rank_pattern", {"(": 4}),
    ("rank_pattern", ["q_proj"]),
    ("alpha_pattern", {"q_proj": 0}),
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(
    written: Path, layout: ModelLayout, field: str, value: object
) -> None:
    _change_config(written, **{field: value})
    with pytest.raises(OpenTinkerError, match=rf"{written}/{CONFIG_FILE}: {field}\b"):
        read_peft(written, layout)


def test_patterns_whose_order_in_the_file_matters_are_refused(written: Path, layout: ModelLayout) -> None:
    one, other = r".*0.*proj", "q_proj"
    _change_config(written, alpha_pattern={one: 1.0, other: 2.0})
    assert read_peft(written, layout).factors["model.layers.0.self_attn.q_proj"].scaling == 1.0 / 4
    _change_config(written, alpha_pattern={other: 2.0, one: 1.0})
    with pytest.raises(OpenTinkerError, match="alpha_pattern: patterns that match the same layers"):
        read_peft(written, layout)


START = "base_model.model.model.layers.0."
CHANGED_TENSORS: list[tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = [
    (
        "a layer lacks a factor",
        lambda t: {k: x for k, x in t.items() if k != f"{START}self_attn.q_proj.lora_B.weight"},
        r"lacks '.*layers\.0\.self_attn\.q_proj\.lora_B\.weight', which target_modules names",
    ),
    (
        "targeted layers are missing",
        lambda t: {k: x for k, x in t.items() if "layers.1" not in k},
        r"lacks '.*layers\.1.* and 3 more, which target_modules names",
    ),
    (
        "a layer is not targeted",
        lambda t: t | {f"{START}self_attn.k_proj.lora_A.weight": torch.ones(4, 32)},
        r"k_proj\.lora_A\.weight' is of a layer that target_modules .* does not name",
    ),
    (
        "a layer is not in the model",
        lambda t: t | {"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.ones(4, 32)},
        r"layers\.7.* is of a layer that the base model lacks",
    ),
    (
        "an embedding",
        lambda t: t | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 61)},
        "embeddings are not supported yet",
    ),
    (
        "dora",
        lambda t: t | {f"{START}self_attn.q_proj.lora_magnitude_vector": torch.ones(32)},
        "DoRA",
    ),
    (
        "a bias",
        lambda t: t | {f"{START}self_attn.q_proj.lora_B.bias": torch.ones(32)},
        "lora_bias",
    ),
    (
        "something else",
        lambda t: t | {"base_model.model.score.weight": torch.ones(2, 32)},
        "'base_model.model.score.weight' is no factor of a linear layer",
    ),
    (
        "another rank",
        lambda t: t | {f"{START}self_attn.q_proj.lora_A.weight": torch.ones(5, 32)},
        r"has the shape \(5, 32\); accepted: \(4, 32\)",
    ),
    (
        "a vector",
        lambda t: t | {f"{START}self_attn.q_proj.lora_A.weight": torch.ones(32)},
        r"has the shape \(32,\); accepted: \(4, 32\)",
    ),
    (
        "integers",
        lambda t: t | {f"{START}self_attn.q_proj.lora_A.weight": torch.ones(4, 32, dtype=torch.int8)},
        r"is torch\.int8; accepted: torch\.float32, torch\.bfloat16, torch\.float16",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [case[1:] for case in CHANGED_TENSORS], ids=[case[0] for case in CHANGED_TENSORS]
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    written: Path, layout: ModelLayout, change: Callable, message: str
) -> None:
    _change_tensors(written, change)
    with pytest.raises(OpenTinkerError, match=message) as caught:
        read_peft(written, layout)
    assert str(caught.value).startswith(f"{written / WEIGHTS_FILE}: ")


@pytest.mark.parametrize("text", ["", "{", "[1]", '"text"', "[" * 100_000, "\ufeff{}"])
def test_a_config_that_is_no_json_object_is_one_message(
    written: Path, layout: ModelLayout, text: str
) -> None:
    (written / CONFIG_FILE).write_text(text)
    with pytest.raises(OpenTinkerError, match=f"{CONFIG_FILE}: is ") as caught:
        read_peft(written, layout)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_named(written: Path, layout: ModelLayout, file: str) -> None:
    (written / file).unlink()
    with pytest.raises(OpenTinkerError, match=file):
        read_peft(written, layout)


def test_a_pickled_adapter_is_not_read(written: Path, layout: ModelLayout) -> None:
    (written / WEIGHTS_FILE).rename(written / "adapter_model.bin")
    with pytest.raises(OpenTinkerError, match=r"adapter_model\.bin is there, but a pickle is not read"):
        read_peft(written, layout)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)
@given(data=st.data())
def test_damaged_weights_are_one_clear_error_or_read(
    pristine: Path, written: Path, layout: ModelLayout, data: st.DataObject
) -> None:
    good = (pristine / WEIGHTS_FILE).read_bytes()
    cut = data.draw(st.integers(0, len(good)))
    at, byte = data.draw(st.integers(0, 1200)), data.draw(st.integers(0, 255))
    damaged = bytearray(good)
    damaged[at] = byte  # in the header, or in the first tensor
    (written / WEIGHTS_FILE).write_bytes(bytes(damaged[:cut]) if cut % 2 else bytes(damaged))
    refused = _refusal(written, layout)
    assert refused is None or refused.startswith(f"{written / WEIGHTS_FILE}: ")
    assert "\n" not in (refused or "")


def _refusal(directory: Path, layout: ModelLayout) -> str | None:
    try:
        read_peft(directory, layout)
    except OpenTinkerError as error:
        return str(error)
    return None
