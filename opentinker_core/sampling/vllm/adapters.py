"""Adapters as vLLM takes them: one rank, one scaling, no patterns, in the server's number format.

Axes: R rank, K inputs, N outputs of a linear layer.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import UsageError
from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.peft_format import write_factors

TARGETS = frozenset(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"))
"""Layers whose adapters were seen to have their whole effect in vLLM."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_adapter(adapter: Adapter, max_rank: int) -> None:
    """Refuse an adapter that a server would refuse or, worse, apply in part.

    Raises:
        UsageError: names the layers, or the rank.
    """
    unknown = sorted({_own_name(name) for name in adapter.factors} - TARGETS)
    if unknown:
        raise UsageError(
            f"target_modules: {', '.join(unknown)} cannot be sampled with vLLM; "
            f"accepted: {', '.join(sorted(TARGETS))}, or runtime.sampler: native"
        )
    if adapter.layout.rank > max_rank:
        raise UsageError(
            f"runtime.vllm.max_lora_rank: {max_rank}, and the adapter has rank {adapter.layout.rank}; "
            f"accepted: at least {adapter.layout.rank}"
        )


def write_for_vllm(adapter: Adapter, directory: Path, base_model: str, dtype: str) -> None:
    """Write a plain equivalent of `adapter` to `directory`, all of it or nothing.

    Each layer's scaling goes into its B, and smaller ranks are filled up with zeros: the products stay what
    they are. It is computed in float32 and rounded to `dtype` once.
    """
    rank = adapter.layout.rank
    factors = {
        name: (
            _padded(layer.A_RK, rank, dtype),
            _padded(layer.scaling * layer.Bt_RN, rank, dtype).T,
        )
        for name, layer in adapter.factors.items()
    }
    targets = _targets(adapter.factors)
    plain = LoRAConfig(rank=rank, alpha=float(rank), target_modules=targets)
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    write_factors(factors, plain, partial, base_model)
    partial.replace(directory)


def write_zero(adapter_layer: tuple[str, int, int], directory: Path, base_model: str, dtype: str) -> None:
    """Write an adapter that changes nothing, on one (name, K, N) linear.

    Base rows are sampled with it: vLLM's CPU build gives rows without an adapter that of its last slot.
    """
    name, inputs, outputs = adapter_layer
    number = _DTYPES[dtype]
    factors = {name: (torch.zeros(1, inputs, dtype=number), torch.zeros(outputs, 1, dtype=number))}
    write_factors(
        factors, LoRAConfig(rank=1, alpha=1.0, target_modules=(_own_name(name),)), directory, base_model
    )


def _padded(factor_RX: Tensor, rank: int, dtype: str) -> Tensor:
    full_RX = pad(factor_RX.detach().cpu(), (0, 0, 0, rank - factor_RX.shape[0]))
    return full_RX.to(_DTYPES[dtype]).contiguous()


def _targets(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({_own_name(name) for name in names}))


def _own_name(name: str) -> str:
    return name.rpartition(".")[2]
