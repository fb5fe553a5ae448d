"""The identity of a model directory: one digest over every file that loading it reads."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from opentinker_core.digests import digest_file, digest_json

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
"""Weights, configs, chat template, vocabulary: what is fetched, and what counts for the digest."""


def fingerprint(directory: Path, cache: Path) -> str:
    """Hex SHA-256 over names and contents of the model files of `directory`.

    The result is kept in `cache` (a directory) together with size and modification time of every
    file, so that the weights are read only once.
    """
    files = sorted({path for pattern in MODEL_FILES for path in directory.glob(pattern)})
    stats = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
    entry = cache / f"{hashlib.sha256(str(directory).encode()).hexdigest()[:16]}.json"
    known = _read(entry)
    if known.get("files") == stats:
        return str(known["digest"])
    digest = digest_json({path.name: digest_file(path) for path in files})
    _write(entry, {"directory": str(directory), "files": stats, "digest": digest})
    return digest


def _read(entry: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(entry.read_text()))
    except FileNotFoundError:
        return {}


def _write(entry: Path, value: dict[str, Any]) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    partial = entry.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(value))
    partial.replace(entry)
