"""Frozen layers as a sampler multiplies by them on a CPU: with weights in the order that oneDNN wants.

A decoding step has few rows, so its products are bound by reading weights; a library that must first
put them into another order takes up to twice as long. Milliseconds for 40 layers 576 -> 1536 in float32 on
two cores, with AVX-512 (AVX2): 8 rows 8 (17) packed, 21 (26) plain; 64 rows 33 (48) packed, 56 (70) plain.
The copy takes the memory of the weight again. With two rows or more, a row gets the same bits whatever
their number.
"""

import torch
from torch import Tensor, nn

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear:
    """A frozen linear layer; its weight is packed when it is first used."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._packed: Tensor | None = None

    @classmethod
    def of(cls, layer: nn.Module) -> "PackedLinear | None":
        """None where there is nothing to gain: no CPU, another library, no plain layer."""
        weight = getattr(layer, "weight", None)
        if type(layer) is not nn.Linear or not isinstance(weight, Tensor):
            return None
        usable = weight.device.type == "cpu" and weight.dtype in _DTYPES
        return cls(layer) if usable and torch.backends.mkldnn.is_available() else None

    def __call__(self, x: Tensor) -> Tensor:
        """`layer(x)`, (..., N), outside of autograd."""
        if self._packed is None:
            weight = self._layer.weight.detach()
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._layer.bias, "none", [], "")
        return result
