"""SHA-256 digests of files and of JSON values, in the one form used by the whole project."""

import hashlib
import json
from pathlib import Path
from typing import Any

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(value: Any) -> bytes:
    """Serialize `value` so that equal values give equal bytes (sorted keys, no spaces, UTF-8)."""
    return _ENCODER.encode(value).encode()


def digest_json(value: Any) -> str:
    """Hex SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def digest_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
