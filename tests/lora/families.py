"""Small random models of the supported architectures, with what trains and samples on them."""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.layer import install
from opentinker_core.lora.pool import AdapterPool
from opentinker_core.models.attention import ATTENTION
from opentinker_core.models.decoder import Decoder
from opentinker_core.training.trainer import Trainer
from opentinker_core.trajectories.types import Datum

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 5
"""Of sliding attention; the tests' sequences are longer."""
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 0]),
    "gemma": GemmaConfig(**SIZES),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        final_logit_softcapping=2.0,
    ),
    "phi3": Phi3Config(**SIZES),
}


@dataclass
class Family:
    """A trainer around a random model, and the plain model beside it."""

    plain: PreTrainedModel
    model: PreTrainedModel
    trainer: Trainer

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Family":
        return cls.around(random_model(config))

    @classmethod
    def around(cls, model: PreTrainedModel) -> "Family":
        """A trainer around `model`."""
        torch.set_num_threads(1)
        plain = deepcopy(model)
        plain.set_attn_implementation("eager")
        pool = AdapterPool(install(model), "cpu", torch.float32)
        return cls(plain, model, Trainer(Decoder.of(model), pool, "random"))

    def random_policy(self, policy: str, lora: LoRAConfig, seed: int = 0) -> None:
        """A policy whose adapter changes the model."""
        self.trainer.create(policy, lora, seed)
        row_P = self.adapter(policy).row_P
        row_P += 0.2 * torch.randn(row_P.shape, generator=torch.Generator().manual_seed(seed))

    def adapter(self, policy: str) -> Adapter:
        return self.trainer.state_of(policy).adapter

    def gradient(self, policy: str) -> Adapter:
        """What `policy` accumulated."""
        gradient = self.trainer.state_of(policy).gradient
        assert gradient is not None
        return gradient

    def publish(self, policy: str, directory: Path) -> Path:
        self.trainer.publish_snapshot(policy, directory)
        return directory


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Every parameter random, biases and norms too, whatever the architecture's own start is."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def random_datums(lengths: tuple[int, ...], seed: int = 0) -> list[Datum]:
    """Sequences of random tokens and weights."""
    generator = np.random.default_rng(seed)
    datums = []
    for n in lengths:
        tokens = generator.integers(3, SIZES["vocab_size"], n + 1)
        weights = generator.uniform(0.5, 1.0, n).astype(np.float32)
        datums.append(Datum(tokens[:-1], tokens[1:], np.ones(n, bool), weights_N=weights))
    return datums
