"""Attention over a flat row of tokens that holds rows of many lengths, each attending to itself only.

The rest of a transformer works on tokens one by one, so a training pass lays the rows of all policies
end to end, without padding them to one width. Only attention has to know where a row begins.

Axes: B rows, T columns of a row, H heads, D features of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "opentinker"
"""The name under which transformers' models find it."""


@dataclass(frozen=True, eq=False)
class FlatRows:
    """Adjacent rows of one width in a flat row of tokens."""

    start: int
    """Of the first row, in tokens."""
    rows: int
    width: int
    positions_BT: Tensor | None = None
    """Position of each token in its sequence; None: 0, 1, ... in every row."""
    visible_BTT: Tensor | None = None
    """bool, true where the second axis' token sees the third's; None: plain causal."""

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + self.rows * self.width)

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """The mask (B, 1, T, T) of a layer that sees `window` positions (None: all); None: plain causal."""
        if window is None or self.width <= window:
            return None if self.visible_BTT is None else self.visible_BTT[:, None]
        visible, positions = self.visible_BTT, self.positions_BT
        if visible is None:
            visible = torch.ones(1, self.width, self.width, dtype=torch.bool, device=device).tril()
        if positions is None:
            positions = torch.arange(self.width, device=device)[None]
        near = positions[:, :, None] - positions[:, None, :] < window
        return (visible & near)[:, None]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    flat_rows: Sequence[FlatRows] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot product attention for transformers' models; with `flat_rows` inputs are (1, H, T, D)."""
    if flat_rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    outputs = []
    for part in flat_rows:
        q, k, v = (
            x[0, :, part.tokens].unflatten(1, (part.rows, part.width)).transpose(0, 1)
            for x in (query, key, value)
        )
        out_BTHD, _ = sdpa_attention_forward(module, q, k, v, part.mask(sliding_window, q.device), **kwargs)
        outputs.append(out_BTHD.flatten(0, 1))
    return torch.cat(outputs)[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
