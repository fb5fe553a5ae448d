"""What a snapshot of a remote run says beside its files: where the service has the same state."""

import json
from pathlib import Path

from opentinker_core.errors import UsageError
from opentinker_core.runtime.remote.connection import Connection

_FILE = "service.json"


def write_reference(directory: Path, url: str, path: str) -> None:
    """Note below `directory` that the service at `url` has this state under `path`."""
    (directory / _FILE).write_text(json.dumps({"url": url, "path": path}, sort_keys=True) + "\n")


def read_reference(directory: Path, connection: Connection, what: str) -> str:
    """Where the service has the state of a snapshot; `what` names it in errors.

    The service is asked, because its address may change.

    Raises:
        UsageError: the service does not have it.
        OpenTinkerError: the service does not answer.
    """
    file = directory / _FILE
    reference = json.loads(file.read_text()) if file.is_file() else {"url": "a local runtime", "path": ""}
    if not reference["path"] or not connection.has(reference["path"]):
        raise UsageError(
            f"{what}: from {reference['url']}, not at {connection.url}, and weights cannot be sent there; "
            "accepted: a version that was trained through it, or its own runtime"
        )
    return str(reference["path"])
