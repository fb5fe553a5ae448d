"""Adapters as plain PEFT directories: `adapter_config.json` and `adapter_model.safetensors`.

The directory loads with `peft.PeftModel.from_pretrained` and with vLLM as it is (vLLM knows one rank
and one alpha: it ignores `rank_pattern` and `alpha_pattern`, so such an adapter is to be merged for
it). Only what this project trains is accepted back; anything else is refused by name instead of being
dropped.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.layout import AdapterLayout, ModelLayout, deciding

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FIELDS = {
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "target_modules",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "use_rslora": "use_rslora",
}
"""PEFT's words for the fields of `LoRAConfig`."""
_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
"""Fields that say nothing about what a finished adapter computes."""
_INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal")
"""Those that leave the base model as it is; the others train on changed weights."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def write_peft(adapter: Adapter, directory: Path, base_model: str) -> None:
    """Write `adapter` below `directory` (created); the bytes depend on nothing but the arguments."""
    factors = {name: (layer.A_RK, layer.Bt_RN.T) for name, layer in adapter.factors.items()}
    write_factors(factors, adapter.config, directory, base_model)


def write_factors(
    factors: Mapping[str, tuple[Tensor, Tensor]], config: LoRAConfig, directory: Path, base_model: str
) -> None:
    """Write the factors A (R, K) and B (N, R) of each layer, by module name, as an adapter of `config`."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (A_RK, B_NR) in factors.items():
        key_A, key_B = _keys(name)
        tensors[key_A] = A_RK.detach().cpu().contiguous()
        tensors[key_B] = B_NR.detach().cpu().contiguous()
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    lora = config.model_dump(mode="json")
    stored = {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "use_dora": False,
    } | {theirs: lora[ours] for theirs, ours in _FIELDS.items()}
    (directory / CONFIG_FILE).write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")


def read_peft(directory: Path, model: ModelLayout, device: torch.device | str = "cpu") -> Adapter:
    """Read an adapter for a model with the given layers; 16-bit factors become float32.

    Raises:
        OpenTinkerError: a file that cannot be read, a feature that is not supported, a target or
            pattern that the model lacks, a missing or additional tensor, or one of another shape.
    """
    path = directory / CONFIG_FILE
    stored = _read_config(path)
    _check_features(stored, path)
    lora = _lora_config(stored, model, path)
    try:
        layout = AdapterLayout.of(lora, model)
    except UsageError as error:
        raise OpenTinkerError(f"{path}: {str(error).removeprefix('policy.lora.')}") from error
    _check_order(stored, layout, path)
    tensors = _read_tensors(directory / WEIGHTS_FILE)
    _check_tensors(tensors, layout, model, directory / WEIGHTS_FILE)
    adapter = Adapter.zeros(layout, device)
    for name, factors in adapter.factors.items():
        key_A, key_B = _keys(name)
        factors.A_RK.copy_(tensors[key_A])
        factors.Bt_RN.copy_(tensors[key_B].T)
    return adapter


def _keys(name: str) -> tuple[str, str]:
    """The tensors of a layer: A (R, K) and B (N, R)."""
    return f"{_PREFIX}{name}.lora_A.weight", f"{_PREFIX}{name}.lora_B.weight"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OpenTinkerError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise OpenTinkerError(f"{path}: is not JSON: {error}") from error
    if not isinstance(stored, dict):
        raise OpenTinkerError(f"{path}: is a {type(stored).__name__}; accepted: a JSON object")
    return stored


def _check_features(stored: dict[str, Any], path: Path) -> None:
    if stored.get("peft_type") != "LORA":
        raise OpenTinkerError(f"{path}: peft_type {stored.get('peft_type')!r:.80}; accepted: 'LORA'")
    start = stored.get("init_lora_weights", True)
    if start not in _INITIALIZATIONS:
        raise OpenTinkerError(
            f"{path}: init_lora_weights {start!r:.80} is not supported, because it changes the base model; "
            f"accepted: {', '.join(map(repr, _INITIALIZATIONS))} (PEFT converts such an adapter with "
            "`save_pretrained(..., path_initial_model_for_weight_conversion=...)`)"
        )
    for field, value in stored.items():
        if field in _FIELDS or field in _WITHOUT_EFFECT or field == "init_lora_weights":
            continue
        if value is None or value is False or value in ("", [], {}) or (field, value) == ("bias", "none"):
            continue
        raise OpenTinkerError(
            f"{path}: {field} {value!r:.80} is not supported; accepted: adapters without it"
        )


def _lora_config(stored: dict[str, Any], model: ModelLayout, path: Path) -> LoRAConfig:
    values = {ours: stored[theirs] for theirs, ours in _FIELDS.items() if stored.get(theirs) is not None}
    for theirs in ("r", "lora_alpha", "target_modules"):
        if _FIELDS[theirs] not in values:
            raise OpenTinkerError(f"{path}: {theirs} is missing; accepted: a value")
    targets = values["target_modules"]
    if isinstance(targets, str):
        values["target_modules"] = _spelled_out(targets, model, path)
    try:
        return LoRAConfig.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
        own = str(details[0]["loc"][0])
        field = next(theirs for theirs, ours in _FIELDS.items() if ours == own)
        # A value that fits no member of a union is reported once a member.
        reasons = dict.fromkeys(detail["msg"] for detail in details if detail["loc"][0] == own)
        reason = " or ".join(reasons).replace("Input should be", "accepted is").removeprefix("Value error, ")
        raise OpenTinkerError(f"{path}: {field} {stored[field]!r:.80}: {reason}") from error


def _spelled_out(targets: str, model: ModelLayout, path: Path) -> str | list[str]:
    """The layers that a regular expression names; PEFT matches it with the whole name."""
    if targets.lower() == "all-linear":
        return "all-linear"
    try:
        names = [name for name in model.shapes if re.fullmatch(targets, name)]
    except re.error as error:
        raise OpenTinkerError(
            f"{path}: target_modules {targets!r:.80} is no regular expression: {error}"
        ) from error
    if not names:
        raise OpenTinkerError(
            f"{path}: target_modules {targets!r:.80} matches no linear layer of the base model"
        )
    return names


def _check_order(stored: dict[str, Any], layout: AdapterLayout, path: Path) -> None:
    """PEFT goes by the order in the file; here, as in files that PEFT wrote, it is the alphabet."""
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = list(stored.get(field) or {})
        if deciding(patterns, layout.factors) != deciding(sorted(patterns), layout.factors):
            raise OpenTinkerError(
                f"{path}: {field}: patterns that match the same layers are not in alphabetical order; "
                "accepted: that order, which PEFT writes too"
            )


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError as error:
        pickled = path.with_suffix(".bin").exists()
        hint = f" ({path.stem}.bin is there, but a pickle is not read)" if pickled else ""
        raise OpenTinkerError(f"{path}: does not exist{hint}") from error
    except (OSError, SafetensorError) as error:
        raise OpenTinkerError(f"{path}: cannot be read as safetensors: {error}") from error


def _check_tensors(tensors: dict[str, Tensor], layout: AdapterLayout, model: ModelLayout, path: Path) -> None:
    shapes: dict[str, tuple[int, int]] = {}
    for name, f in layout.factors.items():
        key_A, key_B = _keys(name)
        shapes |= {key_A: (f.rank, f.inputs), key_B: (f.outputs, f.rank)}
    for key, tensor in tensors.items():
        if key not in shapes:
            if not _is_copy(key, tensor, model):
                raise OpenTinkerError(f"{path}: tensor {key!r} {_why_refused(key, model)}")
        elif tuple(tensor.shape) != shapes[key]:
            raise OpenTinkerError(
                f"{path}: tensor {key!r} has the shape {tuple(tensor.shape)}; accepted: {shapes[key]} "
                f"by {CONFIG_FILE} and the base model"
            )
        elif tensor.dtype not in _DTYPES:
            raise OpenTinkerError(
                f"{path}: tensor {key!r} is {tensor.dtype}; accepted: {', '.join(map(str, _DTYPES))}"
            )
    _check_complete(shapes, tensors, path)


def _check_complete(wanted: Iterable[str], tensors: dict[str, Tensor], path: Path) -> None:
    missing = [key for key in wanted if key not in tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise OpenTinkerError(
            f"{path}: lacks {missing[0]!r}{more}, which target_modules names; accepted: both factors of each "
            "targeted layer"
        )


def _is_copy(key: str, tensor: Tensor, model: ModelLayout) -> bool:
    """Whether a tensor is the base model's embedding or head, which PEFT saves beside a LoRA of the head."""
    name = key.removeprefix(_PREFIX).removesuffix(".weight").removesuffix(".base_layer")
    table = model.tables.get(name)
    return table is not None and torch.equal(tensor.to(table.device, table.dtype), table)


def _why_refused(key: str, model: ModelLayout) -> str:
    name, _, factor = key.removeprefix(_PREFIX).rpartition(".lora_")
    if factor.startswith("embedding_"):
        return "is of an embedding; adapters of embeddings are not supported yet"
    if factor.startswith("magnitude_vector"):
        return "belongs to DoRA, which is not supported"
    if factor in ("A.bias", "B.bias"):
        return "is a bias (lora_bias), which is not supported"
    if key.removesuffix(".weight").removesuffix(".base_layer").removeprefix(_PREFIX) in model.tables:
        return "is not the base model's weight; accepted: the base model that the adapter was trained on"
    if factor not in ("A.weight", "B.weight") or not key.startswith(_PREFIX):
        return "is no factor of a linear layer; accepted: base_model.model.<layer>.lora_A.weight and lora_B"
    if name in model.shapes:
        return f"is of a layer that target_modules of {CONFIG_FILE} does not name"
    return "is of a layer that the base model lacks"
