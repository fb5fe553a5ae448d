"""A causal language model as the two parts that trainer and sampler call: trunk and head.

Axes: B rows, T columns, D hidden features, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from opentinker_core.errors import UsageError
from opentinker_core.models.attention import Layout

ARCHITECTURES = (
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
)
"""Those whose tokens meet in causal attention only, and whose logits are the head's, capped at most.

Others would run, and be wrong where they scale their logits, pass state from token to token past
attention, or keep experts in parameters that are no linear layers. Each of these is tested.
"""


@dataclass(frozen=True, eq=False)
class Decoder:
    """Trunk and head of a frozen model; logits are computed only where somebody wants them."""

    model: PreTrainedModel
    trunk: nn.Module
    head: nn.Module
    checkpointed: tuple[nn.Module, ...] = ()
    """Blocks that keep only their inputs for the backward pass, and run again in it."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Decoder":
        """Take `model` apart.

        Raises:
            UsageError: its architecture, or something that its config asks for, is not supported.
        """
        check_architecture(type(model).__name__)
        check_config(model.config)
        return cls(model, model.model, model.lm_head)

    def with_checkpoints(self, contexts: Callable[[], tuple[Any, Any]]) -> "Decoder":
        """The decoder with gradient checkpointing of its blocks.

        Args:
            contexts: of a block's first and second run (`context_fn` of `torch.utils.checkpoint`).

        Raises:
            UsageError: the model has no blocks that can run again.
        """
        model: Any = self.model
        if not model.supports_gradient_checkpointing:
            name = type(model).__name__
            raise UsageError(
                f"runtime.gradient_checkpointing: True is not supported by {name}; accepted: False"
            )
        enable = getattr(model, "activation_checkpointing_enable", None)  # its name in newer transformers
        enable = enable or model.gradient_checkpointing_enable
        enable({"use_reentrant": False, "context_fn": contexts, "preserve_rng_state": False})
        model.disable_input_require_grads()
        blocks = tuple(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
        return replace(self, checkpointed=blocks)

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
        for block in self.checkpointed:  # in training mode, and then without cache, only for a gradient
            block.training = torch.is_grad_enabled()
        return self.trunk(**inputs).last_hidden_state

    def hidden_of_flat_row(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout) -> Tensor:
        """Last hidden states (T, D) of sequences that lie end to end, each token at the position given."""
        # A mask of four dimensions is passed through as it is; `attend` goes by the layout instead.
        unused = torch.empty(1, 1, 0, 0, device=tokens_T.device)
        hidden_1TD = self.hidden(
            input_ids=tokens_T[None],
            position_ids=positions_T[None],
            attention_mask=unused,
            layout=layout,
            use_cache=False,
        )
        return hidden_1TD[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D)."""
        logits = self.head(hidden)
        cap = getattr(self.config, "final_logit_softcapping", None)  # Gemma; applied past the head
        return logits if cap is None else torch.tanh(logits / cap) * cap


def check_architecture(name: str) -> None:
    """Refuse a model by the name of its class.

    Raises:
        UsageError: it is not one of `ARCHITECTURES`.
    """
    if name not in ARCHITECTURES:
        raise UsageError(
            f"policy.base_model: the architecture {name} is not supported; "
            f"accepted: {', '.join(ARCHITECTURES)}"
        )


def check_config(config: Any) -> None:
    """Refuse what `attend` and rows of many policies in one pass would get wrong.

    Raises:
        UsageError: the Hugging Face config asks for it.
    """
    for field in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, field, None):
            raise UsageError(
                f"policy.base_model: {field} {getattr(config, field)!r} is not supported; "
                "accepted: models without"
            )
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    for kind in kinds:
        if kind.get("rope_type") in _ROPE_BY_LENGTH:
            raise UsageError(
                f"policy.base_model: rope_type {kind['rope_type']!r} is not supported, because it depends on "
                "the longest row of a batch, which may be another policy's; accepted: default, linear, "
                "llama3, yarn"
            )


_ROPE_BY_LENGTH = ("dynamic", "longrope")
