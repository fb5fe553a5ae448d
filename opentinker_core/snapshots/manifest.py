"""The manifest: which files a snapshot consists of, and what may be in one at all.

On disk it is JSON: `{"format": 1, "kind": ..., "digest": ..., "files": [{"name", "size", "sha256"}]}`.
"""

import json
import re
from pathlib import Path
from typing import Any

from opentinker_core.digests import canonical_json, digest_file, digest_json
from opentinker_core.errors import UsageError
from opentinker_core.names import check_name
from opentinker_core.snapshots.protocol import Manifest, SnapshotError, SnapshotFile, SnapshotKind

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1
SUFFIXES = (".safetensors", ".json", ".md", ".txt")
"""What a snapshot may hold: tensors, JSON and text. Nothing that can execute when it is loaded."""

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


def check_file_name(name: str) -> str:
    """Return `name` if a snapshot may hold a file of this name.

    Raises:
        UsageError: it is not a safe name, is reserved, or has a suffix that is not accepted.
    """
    check_name("snapshot file", name)
    if name == MANIFEST_NAME:
        raise UsageError(f"snapshot file: {name!r} is reserved")
    if not name.endswith(SUFFIXES):
        raise UsageError(f"snapshot file: {name!r}; accepted suffixes: {', '.join(SUFFIXES)}")
    return name


def describe(kind: SnapshotKind, directory: Path) -> Manifest:
    """The manifest of the files in `directory`.

    Raises:
        UsageError: it is empty, or holds something that is not a plain file with an accepted name.
        SnapshotError: it cannot be read.
    """
    try:
        paths = sorted(directory.iterdir())
        files = tuple(_describe_file(path) for path in paths)
    except OSError as error:
        raise SnapshotError(
            f"cannot read {error.filename or directory}: {error.strerror or error}"
        ) from error
    if not files:
        raise UsageError(f"snapshot directory: {directory} is empty")
    return Manifest(kind, files, _digest(kind, files))


def _describe_file(path: Path) -> SnapshotFile:
    check_file_name(path.name)
    if path.is_symlink() or not path.is_file():
        raise UsageError(
            f"snapshot file: {path} is a link or a special file; accepted: plain files, no folders"
        )
    return SnapshotFile(path.name, path.stat().st_size, digest_file(path))


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON; equal manifests give equal bytes."""
    return canonical_json(
        {
            "format": MANIFEST_FORMAT,
            "kind": manifest.kind,
            "files": [vars(file) for file in manifest.files],
            "digest": manifest.digest,
        }
    )


def decode(content: bytes, place: str) -> Manifest:
    """Read a manifest, trusting nothing in it. `place` is named in messages.

    Raises:
        SnapshotError: it is not a manifest, is of a newer format, names hostile files, or its
            digest is not that of its content.
    """
    try:
        manifest = _decode(json.loads(content))
    except (ValueError, KeyError, TypeError, RecursionError, UsageError) as error:
        raise SnapshotError(f"{place} is not a valid snapshot manifest: {error}") from error
    if _digest(manifest.kind, manifest.files) != manifest.digest:
        raise SnapshotError(f"{place} is corrupt: its digest is not that of its content")
    return manifest


def _decode(value: Any) -> Manifest:
    if value["format"] != MANIFEST_FORMAT:
        raise ValueError(
            f"format {value['format']!r:.20}; this version of opentinker reads {MANIFEST_FORMAT}"
        )
    files = tuple(_decode_file(entry) for entry in value["files"])
    if not files or len({file.name for file in files}) != len(files):
        raise ValueError("no files, or a file named twice")
    return Manifest(SnapshotKind(value["kind"]), files, str(value["digest"]))


def _decode_file(value: Any) -> SnapshotFile:
    file = SnapshotFile(**value)
    check_file_name(file.name)
    if type(file.size) is not int or file.size < 0 or not _SHA256.match(file.sha256):
        raise ValueError(f"size or SHA-256 of {file.name!r}")
    return file


def verify(directory: Path, manifest: Manifest) -> None:
    """Check that `directory` holds the files of `manifest` and nothing else that could be loaded.

    Raises:
        SnapshotError: a file is missing, one too many, or its size or SHA-256 is wrong.
    """
    try:
        for file in manifest.files:
            path = directory / file.name
            if not path.is_file():
                raise SnapshotError(f"{path} is missing")
            if path.stat().st_size != file.size or digest_file(path) != file.sha256:
                raise SnapshotError(f"{path} is corrupt: its size or SHA-256 is not the manifest's")
        known = {file.name for file in manifest.files}
        for path in directory.iterdir():
            if path.name not in known and not path.name.startswith("."):
                raise SnapshotError(f"{path} is not part of the snapshot; remove it")
    except OSError as error:
        raise SnapshotError(f"cannot read {error.filename}: {error.strerror or error}") from error


def _digest(kind: SnapshotKind, files: tuple[SnapshotFile, ...]) -> str:
    listed = [vars(file) for file in sorted(files, key=lambda file: file.name)]
    return digest_json({"kind": kind, "files": listed})
