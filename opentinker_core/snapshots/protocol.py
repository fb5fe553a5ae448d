"""What a snapshot store is. Nouns: SnapshotKind, SnapshotFile, Manifest, Snapshot, SnapshotStore."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from opentinker_core.errors import OpenTinkerError


class SnapshotError(OpenTinkerError):
    """A snapshot is missing, incomplete, corrupt, or could not be written."""


class SnapshotConflictError(SnapshotError):
    """Another writer published different content under this key first."""


class SnapshotKind(StrEnum):
    """What a snapshot holds."""

    SAMPLER = "sampler"
    """Adapter weights as a plain PEFT directory."""
    CHECKPOINT = "checkpoint"
    """Weights, optimizer state, RNG and step."""


@dataclass(frozen=True)
class SnapshotFile:
    """One file of a snapshot: relative name, bytes, SHA-256."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a snapshot consists of. `digest` covers kind and files, nothing that varies by time or place."""

    kind: SnapshotKind
    files: tuple[SnapshotFile, ...]
    digest: str


@dataclass(frozen=True)
class Snapshot:
    """A reference to a published snapshot; small enough to travel between tasks."""

    kind: SnapshotKind
    uri: str
    """The folder of its files; on a local store a plain (for `sampler`: PEFT) directory."""
    digest: str
    size: int


class SnapshotStore(Protocol):
    """Writes snapshots once, atomically, and hands them out verified."""

    uri: str
    """Root: `file:///...` or `s3://bucket/prefix`."""

    def publish(self, key: tuple[str, ...], kind: SnapshotKind, directory: Path) -> Snapshot:
        """Publish the files in `directory` under `key`, e.g. `("adder-1f2e", "v000012", "sampler")`.

        A snapshot holds plain `.safetensors`, `.json`, `.md` and `.txt` files with safe names, no
        folders and no links.

        Publishing the same content again returns the existing snapshot (so a crash between publish
        and its record can be repeated); of concurrent writers of different content one wins.

        Raises:
            UsageError: a key part is not a safe name (`opentinker_core.names`), or `directory` holds
                nothing or something that is not accepted.
            SnapshotConflictError: the key holds other content.
            SnapshotError: the store cannot be written (full, read-only, unreachable).
        """
        ...

    def manifest(self, uri: str) -> Manifest:
        """The manifest of a published snapshot.

        Raises:
            SnapshotError: there is none, or the URI is outside this store.
        """
        ...

    def fetch(self, uri: str, digest: str | None = None) -> Path:
        """A local directory with the verified files (a cache keyed by digest, for remote stores).

        Raises:
            SnapshotError: missing, or a file's size or SHA-256 is not the manifest's, or the
                manifest's digest is not `digest`.
        """
        ...

    def delete(self, uri: str) -> None:
        """Remove a snapshot (manifest first); idempotent."""
        ...
