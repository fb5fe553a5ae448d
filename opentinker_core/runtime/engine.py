"""The embedded engine: one base model in this process, with its trainer and its native sampler."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from opentinker_core.config.schema import LoRAConfig, RuntimeConfig
from opentinker_core.lora.layer import install
from opentinker_core.lora.layout import target_names
from opentinker_core.lora.pool import AdapterPool
from opentinker_core.models.decoder import Decoder
from opentinker_core.models.loading import load_model, load_tokenizer
from opentinker_core.models.placement import placement
from opentinker_core.models.source import ModelSource, resolve
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.training.trainer import LayoutSettings, Trainer


@dataclass(frozen=True, eq=False)
class Engine:
    """A loaded base model and what computes with it. The weights are shared; policies only add adapters."""

    source: ModelSource
    tokenizer: PreTrainedTokenizerBase
    trainer: Trainer
    sampler: NativeSampler
    max_context: int
    dtype: str
    """`float32` or `bfloat16`."""
    check_targets: Callable[[LoRAConfig], object]
    """Raises UsageError if a LoRA config does not fit the base model."""


def open_engine(
    base_model: str, config: RuntimeConfig, home: Path, fetch: Callable[[str, str], Path]
) -> Engine:
    """Load `base_model` where `config` says.

    Args:
        fetch: gives the verified local directory of a snapshot, from its URI and digest.

    Raises:
        UsageError: the model or the device is unknown, or its architecture has no separate head.
    """
    place = placement(config)
    source = resolve(base_model, home)
    model = load_model(source, place.device, place.dtype)
    tokenizer = load_tokenizer(source)
    linears = install(model)
    decoder = Decoder.of(model)
    pool = AdapterPool(linears, place.device, place.dtype, config.adapter_slots)
    layout = LayoutSettings(config.micro_batch_tokens, config.share_prefix, config.pack)
    trainer = Trainer(decoder, pool, source.name, layout)
    sampler = NativeSampler(decoder, pool, tokenizer, fetch, trainer.read_adapter)
    return Engine(
        source=source,
        tokenizer=tokenizer,
        trainer=trainer,
        sampler=sampler,
        max_context=decoder.max_context,
        dtype=str(place.dtype).removeprefix("torch."),
        check_targets=lambda lora: target_names(lora, linears),
    )
