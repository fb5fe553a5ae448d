"""Adapters written for vLLM compute what ours compute; what vLLM would drop is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import UsageError
from opentinker_core.lora.adapter import Adapter, fresh_adapter
from opentinker_core.lora.layout import ModelLayout
from opentinker_core.sampling.vllm.adapters import check_adapter, write_for_vllm

MODEL = ModelLayout.of(
    {
        f"model.layers.{layer}.{name}": shape
        for layer in range(2)
        for name, shape in {
            "self_attn.q_proj": (16, 24),
            "self_attn.v_proj": (16, 8),
            "mlp.down_proj": (32, 16),
            "mlp.router": (16, 4),
        }.items()
    }
    | {"lm_head": (16, 40)}
)
LORA = LoRAConfig(
    rank=3,
    alpha=5.0,
    target_modules=("q_proj", "v_proj", "down_proj", "lm_head"),
    rank_pattern={"1.self_attn.q_proj": 6, "v_proj": 2},
    alpha_pattern={"down_proj": 0.7},
    use_rslora=True,
)


def random_adapter(config: LoRAConfig) -> Adapter:
    adapter = fresh_adapter(config, MODEL, seed=0)
    adapter.row_P.normal_(generator=torch.Generator().manual_seed(0))
    return adapter


def updates(adapter: Adapter) -> dict[str, torch.Tensor]:
    """The (N, K) update of each layer."""
    return {name: f.scaling * f.Bt_RN.T @ f.A_RK for name, f in adapter.factors.items()}


def stored_updates(directory: Path) -> dict[str, torch.Tensor]:
    """What a reader that knows one rank and one alpha makes of a directory."""
    config = json.loads((directory / "adapter_config.json").read_text())
    assert [config[name] for name in ("rank_pattern", "alpha_pattern", "use_rslora")] == [{}, {}, False]
    tensors = load_file(directory / "adapter_model.safetensors")
    names = {key.split(".lora_")[0].removeprefix("base_model.model.") for key in tensors}
    result = {}
    for name in names:
        A, B = (tensors[f"base_model.model.{name}.lora_{which}.weight"].float() for which in "AB")
        assert len(A) == B.shape[1] == config["r"]
        result[name] = config["lora_alpha"] / config["r"] * B @ A
    return result


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.02)])
def test_ranks_alphas_and_rslora_become_one_plain_adapter(
    tmp_path: Path, dtype: str, tolerance: float
) -> None:
    adapter = random_adapter(LORA)
    write_for_vllm(adapter, tmp_path / "a", "base", dtype)
    expected, stored = updates(adapter), stored_updates(tmp_path / "a")
    assert stored.keys() == expected.keys()
    for name, update_NK in expected.items():
        largest = update_NK.abs().max()
        assert (stored[name] - update_NK).abs().max() < tolerance * largest, name


def test_layers_that_vllm_is_not_known_to_apply_are_refused_by_name() -> None:
    adapter = random_adapter(LoRAConfig(target_modules=("q_proj", "router")))
    with pytest.raises(UsageError, match=r"target_modules: router cannot be sampled with vLLM; accepted: .*"):
        check_adapter(adapter, 16)


def test_a_larger_rank_than_the_servers_is_refused() -> None:
    adapter = random_adapter(LORA)
    check_adapter(adapter, 6)
    with pytest.raises(
        UsageError, match="max_lora_rank: 5, and the adapter has rank 6; accepted: at least 6"
    ):
        check_adapter(adapter, 5)
