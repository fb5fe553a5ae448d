"""Attention over a flat row of tokens that holds sequences of many lengths, each attending to itself only.

The rest of a transformer works on tokens one by one, so trainer and sampler lay the sequences of all
policies end to end, without padding them to one width. Only attention has to know where one begins; a
layout tells it.

Axes: B rows, T columns of a row, H heads, D features of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "opentinker"
"""The name under which transformers' models find it."""


class Layout(Protocol):
    """Where the sequences of a flat row lie, and what each of their tokens sees."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None,
        **kwargs: Any,
    ) -> Tensor:
        """Outputs (T, H, D) of queries (1, H, T, D) with the keys and values of the same tokens.

        `window`: positions that the layer sees; None: all. `module.layer_idx` says which layer it is.
        """
        ...


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


@dataclass(frozen=True, eq=False)
class SeparateRows:
    """The layout of a pass without cache: blocks of rows, end to end."""

    blocks: Sequence[FlatRows]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None,
        **kwargs: Any,
    ) -> Tensor:
        """See `Layout.attend`."""
        outputs = []
        for part in self.blocks:
            q, k, v = (
                x[0, :, part.tokens].unflatten(1, (part.rows, part.width)).transpose(0, 1)
                for x in (query, key, value)
            )
            out_BTHD, _ = sdpa_attention_forward(module, q, k, v, part.mask(window, q.device), **kwargs)
            outputs.append(out_BTHD.flatten(0, 1))
        return torch.cat(outputs)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot product attention for transformers' models; with a `layout` inputs are (1, H, T, D)."""
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return layout.attend(module, query, key, value, sliding_window, **kwargs)[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
