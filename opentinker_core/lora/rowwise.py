"""Frozen layers whose rows do not depend, to the bit, on the number of rows.

A policy's rows go through the base model together with other policies' rows. A matrix library may
choose another order of summation for another number of rows, and then removing somebody's data would
change the last bits of everybody's results. Where it does, products are made in tiles of one size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opentinker_core.lora.layout import ModelLayout

TILE = 64
"""Rows of a tile; large enough for most of the speed of a large product."""
QUANTUM = 8
"""Policies' rows come in multiples of this many, so that no product has very few of them."""
_SAMPLES = (8, 16, 40, 64, 136, 200, 512)
"""Numbers of rows that are tried."""
_LEAST, _MOST = 4096, 32768
"""Elements from which torch gives some (gelu) and most functions to one more thread: ATen's grain sizes."""


@dataclass(frozen=True)
class Rowwise:
    """How to multiply rows by a frozen weight; `tile` 0: all at once."""

    tile: int

    @classmethod
    def measured(cls, model: nn.Module, layout: ModelLayout) -> "Rowwise":
        """Tiles, if the device needs them for the shapes of the model's layers (tried in milliseconds)."""
        weight = next(model.parameters())
        shapes = {
            (group.inputs, min(outputs, 4096)) for group in layout.groups for _, outputs in group.members
        }
        invariant = all(_is_invariant(*shape, weight.device, weight.dtype) for shape in shapes)
        return cls(0 if invariant else TILE)

    def __call__(self, layer: nn.Module, x: Tensor) -> Tensor:
        """`layer(x)`, (..., N)."""
        if self.tile == 0:
            return layer(x)
        x_TK = x.reshape(-1, x.shape[-1])
        y_TN = torch.cat([layer(_padded(part, self.tile)) for part in x_TK.split(self.tile)])
        return y_TN[: len(x_TK)].view(*x.shape[:-1], -1)

    def back(self, layer: nn.Module, dy_TN: Tensor, into_TK: Tensor | None = None) -> Tensor:
        """`dy W` (T, K), added to `into_TK` if given."""
        weight_NK: Tensor = layer.weight  # type: ignore[assignment]
        if self.tile == 0:
            return dy_TN @ weight_NK if into_TK is None else into_TK.addmm_(dy_TN, weight_NK)
        parts = [_padded(part, self.tile) @ weight_NK for part in dy_TN.split(self.tile)]
        dx_TK = torch.cat(parts)[: len(dy_TN)]
        return dx_TK if into_TK is None else into_TK.add_(dx_TK)


class Elementwise(nn.Module):
    """An activation function that gives an element the same bits whatever the number of elements.

    torch computes vectors of elements one way and what is left over at the end of a thread's share
    another. So each share must be whole vectors: here it has `_MOST` elements, or all of a small block.
    """

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """The function of each element."""
        threads = torch.get_num_threads()
        if x.device.type != "cpu" or threads <= 2 or x.numel() <= _LEAST:  # halves are whole vectors
            return self.function(x)
        flat = x.reshape(-1)
        shared = len(flat) - len(flat) % (threads * _MOST)
        blocks = (*flat[:shared].split(threads * _MOST), *flat[shared:].split(_LEAST))
        return torch.cat([self.function(block) for block in blocks if len(block)]).view_as(x)


def _padded(x_TK: Tensor, rows: int) -> Tensor:
    return x_TK if len(x_TK) == rows else nn.functional.pad(x_TK, (0, 0, 0, rows - len(x_TK)))


def _is_invariant(inputs: int, outputs: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this shape give a row the same bits whatever the number of rows."""
    generator = torch.Generator().manual_seed(0)
    x_TK, W_NK, dy_TN = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((max(_SAMPLES) + 8, inputs), (outputs, inputs), (max(_SAMPLES) + 8, outputs))
    )
    y_TN, dx_TK = nn.functional.linear(x_TK, W_NK), dy_TN @ W_NK
    return all(
        torch.equal(nn.functional.linear(x_TK[8 : 8 + rows], W_NK), y_TN[8 : 8 + rows])
        and torch.equal(dy_TN[8 : 8 + rows] @ W_NK, dx_TK[8 : 8 + rows])
        for rows in _SAMPLES
    )
