"""Another process that publishes, for tests of races and of death in the middle.

    python -m tests.snapshots.worker URI CACHE ENDPOINT KEY DIRECTORY [STOP_BEFORE_WRITE]

Prints `ready`, waits for a line on stdin, publishes, prints the digest or `conflict`. With
STOP_BEFORE_WRITE = n it prints `stopped` before the n-th write to the store and waits to be killed.
"""

import sys
import time
from pathlib import Path
from typing import Any

from opentinker_core.snapshots.blobs import open_blob_store
from opentinker_core.snapshots.protocol import SnapshotConflictError, SnapshotKind
from opentinker_core.snapshots.store import BlobSnapshotStore


class Stopping:
    """Passes on to the store until the n-th write."""

    def __init__(self, blobs: Any, stop_before: int) -> None:
        self._blobs, self._writes_left = blobs, stop_before

    def __getattr__(self, name: str) -> Any:
        if name in ("put", "put_if_absent"):
            self._writes_left -= 1
            if self._writes_left == 0:
                print("stopped", flush=True)
                time.sleep(600)
        return getattr(self._blobs, name)


def main(uri: str, cache: str, endpoint: str, key: str, directory: str, stop_before: str = "0") -> None:
    blobs: Any = Stopping(open_blob_store(uri, endpoint), int(stop_before))
    store = BlobSnapshotStore(blobs, Path(cache))
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        snapshot = store.publish(tuple(key.split("/")), SnapshotKind.CHECKPOINT, Path(directory))
    except SnapshotConflictError:
        print("conflict", flush=True)
    else:
        print(snapshot.digest, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
