"""The adapters that the Tinker API can ask for, from our LoRA config."""

from dataclasses import dataclass

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import UsageError

ALPHA = 32.0
"""Of every adapter of a Tinker service: the API has no field for it."""

_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
_HEAD = frozenset({"lm_head"})


@dataclass(frozen=True)
class TinkerLora:
    """What the API asks for."""

    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


def tinker_lora(lora: LoRAConfig) -> TinkerLora:
    """What to ask the API for to get the adapter that `lora` describes.

    Raises:
        UsageError: the API has no way to.
    """
    plain = LoRAConfig(rank=lora.rank, alpha=ALPHA, target_modules=lora.target_modules)
    if lora != plain:
        field = next(name for name in LoRAConfig.model_fields if getattr(lora, name) != getattr(plain, name))
        raise UsageError(
            f"policy.lora.{field}: {getattr(lora, field)!r}; "
            f"accepted with runtime.url: {getattr(plain, field)!r}, as of every adapter of a service"
        )
    targets = _ATTENTION | _MLP if lora.target_modules == "all-linear" else frozenset(lora.target_modules)
    left = targets
    trained = []
    for group in (_ATTENTION, _MLP, _HEAD):
        trained.append(group <= targets)
        left -= group if group <= targets else frozenset()
    if left:
        raise UsageError(
            f"policy.lora.target_modules: {sorted(targets)}; accepted with runtime.url: 'all-linear', or "
            "whole groups: q_proj, k_proj, v_proj, o_proj; gate_proj, up_proj, down_proj; lm_head"
        )
    return TinkerLora(lora.rank, *trained)
