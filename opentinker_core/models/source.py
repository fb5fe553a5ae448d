"""From a base model's name to a directory of weights and their digest."""

import re
from dataclasses import dataclass
from pathlib import Path

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.models.bundled import BUNDLED, ensure
from opentinker_core.models.fingerprint import MODEL_FILES, fingerprint
from opentinker_core.models.progress import Report, silent

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z", re.ASCII)


@dataclass(frozen=True)
class ModelSource:
    """A base model on local disk."""

    name: str
    """A bundled name or hub id as given; for a local directory its absolute path."""
    path: Path
    digest: str
    """Hex SHA-256 over weights, config and tokenizer."""


def resolve(name: str, home: Path, *, report: Report = silent) -> ModelSource:
    """Find the base model `name`, fetching or building it first where needed.

    Takes milliseconds once the model is there. A bundled name wins over a directory of that name;
    `./name` means the directory.

    Raises:
        UsageError: the name is not known, or the directory holds no model.
        OpenTinkerError: the model could not be fetched or `home` cannot be written.
    """
    if name in BUNDLED:
        return _source(name, ensure(BUNDLED[name], home, report), home)
    directory = Path(name).expanduser()
    if name and directory.is_dir():
        directory = directory.absolute()
        return _source(str(directory), directory, home)
    if _HUB_ID.match(name):
        return _source(name, _from_hub(name, report), home)
    raise UsageError(f"base_model: {name!r} is unknown; accepted: {_accepted()}")


def _accepted() -> str:
    return f"{', '.join(BUNDLED)}, a local Hugging Face directory, or a hub id 'organization/model'"


def _source(name: str, directory: Path, home: Path) -> ModelSource:
    for needed, what in (("config.json", "config.json"), ("*.safetensors", "safetensors weights")):
        if not any(directory.glob(needed)):
            message = (
                f"base_model: {str(directory)!r} is not a Hugging Face model directory: it has no {what}"
            )
            raise UsageError(f"{message}; accepted: {_accepted()}")
    cache = home.expanduser().absolute() / "models" / "digests"
    try:
        return ModelSource(name, directory, fingerprint(directory, cache))
    except OSError as error:
        raise OpenTinkerError(f"base model {name!r}: {error}") from error


def _from_hub(name: str, report: Report) -> Path:
    """Download a snapshot into the hub's own cache, or find it there when offline."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError

    report(f"downloading {name} from the hub", 0, 0)
    try:
        return Path(snapshot_download(name, allow_patterns=list(MODEL_FILES)))
    except (OSError, ValueError, HTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        message = f"base model {name!r}: no such local directory, and the hub did not give it ({reason})"
        raise OpenTinkerError(f"{message}; accepted: {_accepted()}") from error
