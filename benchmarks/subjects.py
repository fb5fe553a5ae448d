"""The base models that benchmarks measure with: as they are, for peers, and with our layers."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from opentinker_core.config.settings import Settings
from opentinker_core.lora.layer import install
from opentinker_core.lora.pool import AdapterPool
from opentinker_core.models.attention import ATTENTION
from opentinker_core.models.decoder import Decoder
from opentinker_core.models.loading import load_model
from opentinker_core.models.placement import available_cores
from opentinker_core.models.source import resolve


@dataclass(frozen=True)
class Subject:
    """A base model in one number format."""

    name: str
    dtype: torch.dtype
    vocabulary: int
    load: Callable[[torch.dtype], PreTrainedModel]

    def plain(self) -> PreTrainedModel:
        """The model as transformers gives it, with the attention that it chooses itself."""
        model = self.load(self.dtype)
        model.set_attn_implementation("sdpa")
        return model

    def fused(self, slots: int = 64) -> tuple[Decoder, AdapterPool]:
        """The model with our layers."""
        model = self.load(self.dtype)
        model.set_attn_implementation(ATTENTION)
        pool = AdapterPool(install(model), model.device, self.dtype, slots)
        return Decoder.of(model), pool


def tiny(dtype: torch.dtype) -> Subject:
    """A random Llama of 4 layers and 256 hidden features: all overhead, hardly any arithmetic."""
    torch.set_num_threads(available_cores())
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )

    def load(dtype: torch.dtype) -> PreTrainedModel:
        torch.manual_seed(0)
        return LlamaForCausalLM(deepcopy(config)).to(dtype).eval().requires_grad_(False)

    return Subject("tiny", dtype, config.vocab_size, load)


def smollm2(dtype: torch.dtype) -> Subject:
    """SmolLM2-135M, the bundled model."""
    torch.set_num_threads(available_cores())
    source = resolve("smollm2-135m", Settings().home)
    return Subject("smollm2", dtype, 49152, lambda wanted: load_model(source, "cpu", wanted))


MODELS: dict[str, Callable[[torch.dtype], Subject]] = {"tiny": tiny, "smollm2": smollm2}
