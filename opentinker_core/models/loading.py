"""Load weights and tokenizers: local files, safetensors, no code from the model's directory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from opentinker_core.errors import OpenTinkerError
from opentinker_core.models.attention import ATTENTION
from opentinker_core.models.decoder import check_architecture, check_config
from opentinker_core.models.source import ModelSource


def load_model(source: ModelSource, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load the frozen base model: evaluation mode, no gradients, scaled dot product attention.

    Raises:
        UsageError: the model is not supported, as its `config.json` says; no weights were read.
        OpenTinkerError: the weights are corrupt or incomplete, or transformers does not know the model.
    """
    _check_supported(source)
    with _one_message(source), no_progress_bar():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=dtype,
            attn_implementation=ATTENTION,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    model, loading = loaded
    if loading["missing_keys"]:  # transformers would go on with random weights
        raise OpenTinkerError(
            f"base model {source.name!r}: no weights for {sorted(loading['missing_keys'])[:3]}"
        )
    return model.to(device).eval().requires_grad_(False)


def _check_supported(source: ModelSource) -> None:
    with _one_message(source):
        config = AutoConfig.from_pretrained(source.path, local_files_only=True)
    # What AutoModelForCausalLM goes by: `architectures` may name a model without a head, or be missing.
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    check_architecture(found or (config.architectures or [config.model_type])[0])
    check_config(config)


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Load the model's own tokenizer.

    Raises:
        OpenTinkerError: the directory holds no usable tokenizer.
    """
    with _one_message(source):
        return AutoTokenizer.from_pretrained(source.path, local_files_only=True)


@contextmanager
def _one_message(source: ModelSource) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise OpenTinkerError(
            f"base model {source.name!r} cannot be loaded from {source.path}: {reason}"
        ) from error


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing a bar: what is loaded and saved here takes seconds."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
