"""Whole files under names, written atomically: what the snapshot and trajectory stores stand on.

Nouns: BlobStore, BlobError, BlobMissingError. A key is `/`-joined safe names
(`opentinker_core.names`), so that no key can leave the root or hide inside it.
"""

import re
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from opentinker_core.errors import UsageError
from opentinker_core.names import check_name
from opentinker_core.snapshots.protocol import SnapshotError

_S3_URI = re.compile(r"s3://(?P<bucket>[^/]+)(?:/(?P<prefix>.*))?\Z")
_MAX_KEY = 900  # S3 allows 1024 bytes, the store's prefix included


class BlobError(SnapshotError):
    """A file of a store could not be read or written; the message names its place and the reason."""


class BlobMissingError(BlobError):
    """There is no file under this key."""


class BlobStore(Protocol):
    """Files under keys. A reader sees a file whole or not at all, whatever happens to its writer."""

    uri: str
    """Root: `file:///directory` or `s3://bucket/prefix`, without a slash at the end."""

    def put(self, key: str, source: Path | bytes) -> None:
        """Write a file (or these bytes) under `key`, replacing what was there.

        Raises:
            UsageError: `key` is not made of safe names. (So for every method.)
            BlobError: it could not be written (full, read-only, unreachable).
        """
        ...

    def put_if_absent(self, key: str, source: Path | bytes) -> bool:
        """Write unless there is a file under `key`; of concurrent writers exactly one gets True.

        Raises:
            BlobError: it could not be written, or the store cannot promise a single winner.
        """
        ...

    def read(self, key: str) -> bytes:
        """The bytes of a small file.

        Raises:
            BlobMissingError: there is none.
            BlobError: it could not be read.
        """
        ...

    def get(self, key: str, target: Path) -> None:
        """Copy a file to the local path `target`; raises as `read` does."""
        ...

    def exists(self, key: str) -> bool:
        """Whether there is a file under `key`."""
        ...

    def delete(self, key: str) -> None:
        """Remove the file; nothing happens if there is none."""
        ...

    def local_path(self, key: str) -> Path | None:
        """Where the file or folder `key` lies on this machine's disk; None for a remote store."""
        ...

    def list(self, folder: str = "") -> list[str]:
        """Keys of all files below `folder` (default: of the whole store), sorted."""
        ...


def check_key(key: str) -> str:
    """Return `key` if all its parts are safe names.

    Raises:
        UsageError: a part is not, or the key is too long.
    """
    for part in key.split("/"):
        check_name("key", part)
    if len(key) > _MAX_KEY:
        raise UsageError(f"key: {len(key)} characters are too many; accepted: up to {_MAX_KEY}")
    return key


def key_of(uri: str, root: str) -> str:
    """The key of `uri` in the store with the root URI `root`.

    Raises:
        BlobError: `uri` lies outside the store, or is not made of safe names.
    """
    if not uri.startswith(root + "/"):
        raise BlobError(f"{uri!r:.200} is outside the store {root}")
    try:
        return check_key(uri.removeprefix(root + "/"))
    except UsageError as error:
        raise BlobError(f"{uri!r:.200} is not the URI of a stored file: {error}") from error


def open_blob_store(uri: str, endpoint_url: str = "") -> BlobStore:
    """Open the store at `uri`: `file:///directory` or `s3://bucket[/prefix]`.

    Nothing is read or written yet. `endpoint_url` names an S3-compatible server; empty: AWS, or
    what boto3 reads from `AWS_ENDPOINT_URL`.

    Raises:
        UsageError: `uri` is neither.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        from opentinker_core.snapshots.local import LocalBlobStore

        return LocalBlobStore(Path(unquote(parts.path)))
    if match := _S3_URI.match(uri):
        from opentinker_core.snapshots.s3 import S3BlobStore

        prefix = (match["prefix"] or "").strip("/")
        return S3BlobStore(match["bucket"], check_key(prefix) if prefix else "", endpoint_url)
    raise UsageError(f"store: {uri!r:.200}; accepted: 'file:///directory' or 's3://bucket/prefix'")
