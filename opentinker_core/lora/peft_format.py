"""Adapters as plain PEFT directories: `adapter_config.json` and `adapter_model.safetensors`.

The directory loads with `peft.PeftModel.from_pretrained` and with vLLM as it is. Only what this
project trains is accepted back; anything else is refused by name instead of being dropped.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import OpenTinkerError
from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.layout import AdapterLayout, ModelLayout

_PREFIX = "base_model.model."
_REFUSED = {
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "bias": "none",
    "modules_to_save": None,
}


def write_peft(adapter: Adapter, directory: Path, base_model: str) -> None:
    """Write `adapter` below `directory` (created); the bytes depend on nothing but the arguments."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, factors in adapter.factors.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = factors.A_RK.detach().cpu().contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = factors.Bt_RN.detach().cpu().T.contiguous()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": adapter.config.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapter.config.rank,
        "target_modules": sorted(adapter.factors),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def read_peft(directory: Path, model: ModelLayout, device: torch.device | str = "cpu") -> Adapter:
    """Read an adapter for a model with the given layers.

    Raises:
        OpenTinkerError: a feature that is not supported, a layer that the model lacks or that has
            another shape, a missing or additional factor.
    """
    config = json.loads((directory / "adapter_config.json").read_text())
    _check_features(config, directory)
    tensors = load_file(directory / "adapter_model.safetensors")
    names = sorted({_layer_of(key, directory) for key in tensors})
    shapes = model.shapes
    found = {}
    for name in names:
        A_RK, B_NR = (tensors.get(f"{_PREFIX}{name}.lora_{which}.weight") for which in "AB")
        if name not in shapes or A_RK is None or B_NR is None:
            raise OpenTinkerError(f"{directory}: layer {name!r} is not in the base model, or lacks a factor")
        given = (tuple(A_RK.shape), tuple(B_NR.shape))
        inputs, outputs = shapes[name]
        expected = ((config["r"], inputs), (outputs, config["r"]))
        if given != expected:
            raise OpenTinkerError(f"{directory}: layer {name!r} has factors {given}; accepted: {expected}")
        found[name] = (A_RK, B_NR.T)
    lora = LoRAConfig(rank=config["r"], alpha=config["lora_alpha"], target_modules=tuple(names))
    adapter = Adapter.zeros(AdapterLayout.of(lora, model), device)
    for name, factors in adapter.factors.items():
        A_RK, Bt_RN = found[name]
        factors.A_RK.copy_(A_RK)
        factors.Bt_RN.copy_(Bt_RN)
    return adapter


def _layer_of(key: str, directory: Path) -> str:
    for suffix in (".lora_A.weight", ".lora_B.weight"):
        if key.startswith(_PREFIX) and key.endswith(suffix):
            return key[len(_PREFIX) : -len(suffix)]
    raise OpenTinkerError(f"{directory}: tensor {key!r} is not a LoRA factor of a linear layer")


def _check_features(config: dict[str, Any], directory: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise OpenTinkerError(f"{directory}: peft_type {config.get('peft_type')!r}; accepted: 'LORA'")
    for field, accepted in _REFUSED.items():
        if config.get(field, accepted) != accepted:
            raise OpenTinkerError(
                f"{directory}: {field} {config[field]!r} is not supported; accepted: {accepted!r}"
            )
    for field in ("rank_pattern", "alpha_pattern"):
        if config.get(field):
            raise OpenTinkerError(f"{directory}: {field} is not supported; accepted: one rank and alpha")
