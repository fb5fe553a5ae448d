"""A causal language model as the two parts that trainer and sampler call: trunk and head.

Axes: B rows, T columns, D hidden features, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from opentinker_core.errors import UsageError
from opentinker_core.models.attention import FlatRows


@dataclass(frozen=True, eq=False)
class Decoder:
    """Trunk and head of a frozen model; logits are computed only where somebody wants them."""

    model: PreTrainedModel
    trunk: nn.Module
    head: nn.Module

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Decoder":
        """Take `model` apart.

        Raises:
            UsageError: its architecture does not have these parts.
        """
        trunk, head = getattr(model, "model", None), getattr(model, "lm_head", None)
        if not isinstance(trunk, nn.Module) or not isinstance(head, nn.Module):
            raise UsageError(
                f"policy.base_model: {type(model).__name__} is not supported; "
                "accepted: decoder models with the parts `model` and `lm_head`"
            )
        return cls(model, trunk, head)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def config(self) -> Any:
        """The Hugging Face config."""
        return self.model.config

    @property
    def max_context(self) -> int:
        """Positions the model was made for."""
        return int(self.config.max_position_embeddings)

    def hidden(self, **inputs: Any) -> Tensor:
        """Last hidden states (B, T, D) of the trunk, called as transformers wants it."""
        return self.trunk(**inputs).last_hidden_state

    def hidden_of_flat_rows(
        self, tokens_T: Tensor, positions_T: Tensor, flat_rows: Sequence[FlatRows]
    ) -> Tensor:
        """Last hidden states (T, D) of rows that lie end to end, each at the positions given."""
        # A mask of four dimensions is passed through as it is; `attend` goes by `flat_rows` instead.
        unused = torch.empty(1, 1, 0, 0, device=tokens_T.device)
        hidden_1TD = self.hidden(
            input_ids=tokens_T[None],
            position_ids=positions_T[None],
            attention_mask=unused,
            flat_rows=flat_rows,
            use_cache=False,
        )
        return hidden_1TD[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D)."""
        return self.head(hidden)
