"""Write an ordinary Hugging Face model directory, byte for byte the same from the same input.

The JSON is written here and not by `save_pretrained`, whose output carries library versions and
changes with them; the digest of a bundled model must not.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer


def write_model_directory(
    target: Path,
    *,
    config: dict[str, Any],
    tensors: "dict[str, torch.Tensor]",
    tokenizer: "Tokenizer",
    tokenizer_config: dict[str, Any],
    card: str,
) -> None:
    """Create `target` with weights, config, generation config, tokenizer and model card, on disk for good."""
    from safetensors.torch import save_file

    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    generation: dict[str, Any] = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
    }
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", generation)
    _write_json(target / "tokenizer_config.json", tokenizer_config)
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "README.md").write_text(card)
    mode = (target / "config.json").stat().st_mode
    (target / "model.safetensors").chmod(mode)  # safetensors lets only the owner read
    for path in target.iterdir():
        _flush(path)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _flush(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
