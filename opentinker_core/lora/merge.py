"""Fold an adapter into the base model, for engines that know no LoRA."""

import torch
from torch import nn
from transformers import PreTrainedModel

from opentinker_core.errors import OpenTinkerError
from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.layout import HEAD


@torch.no_grad()
def merge(model: PreTrainedModel, adapter: Adapter) -> None:
    """Add `scaling * (A^T Bt)^T` to each targeted weight of a plain `model`, in place.

    A head that shares its weight with the embedding gets a weight of its own first: the adapter
    changes the head only.

    Raises:
        OpenTinkerError: a targeted layer is quantized.
    """
    for name in adapter.factors:
        layer = model.get_submodule(name)
        if not (isinstance(layer, nn.Linear) and layer.weight.is_floating_point()):
            raise OpenTinkerError(
                f"merge: layer {name!r} is a quantized {type(layer).__name__}; "
                "accepted: linear layers of floats"
            )
    if HEAD in adapter.factors and model.config.tie_word_embeddings:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
    for name, factors in adapter.factors.items():
        weight_NK = model.get_parameter(f"{name}.weight")
        delta_NK = factors.scaling * (factors.Bt_RN.T @ factors.A_RK)
        weight_NK.copy_((weight_NK.float() + delta_NK.to(weight_NK.device)).to(weight_NK.dtype))
