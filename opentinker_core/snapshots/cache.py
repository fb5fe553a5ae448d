"""The local cache of a remote store: one verified directory a digest, downloaded once a machine."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from opentinker_core.snapshots.manifest import verify
from opentinker_core.snapshots.protocol import Manifest, SnapshotError

Download = Callable[[str, Path], None]
"""Writes the file of this name to this path."""


class SnapshotCache:
    """Directories `root/<digest>`, each put in place by one rename."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def directory(self, manifest: Manifest, download: Download) -> Path:
        """The verified files of `manifest`, downloaded unless they are here.

        Of concurrent processes one downloads and the others wait for it; a damaged copy is
        replaced.

        Raises:
            SnapshotError: what was downloaded is not what the manifest says, or cannot be written.
        """
        target = self._root / manifest.digest
        with _translated(target), self._locked(manifest.digest):
            if target.is_dir():
                try:
                    verify(target, manifest)
                    return target
                except SnapshotError:
                    shutil.rmtree(target)
            self._fill(target, manifest, download)
        return target

    def _fill(self, target: Path, manifest: Manifest, download: Download) -> None:
        staged = self._root / f".{manifest.digest}.{secrets.token_hex(8)}"
        staged.mkdir()
        try:
            for file in manifest.files:
                download(file.name, staged / file.name)
            verify(staged, manifest)
            staged.rename(target)
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    @contextmanager
    def _locked(self, digest: str) -> Iterator[None]:
        """Hold the digest's lock; the kernel releases it when its holder dies."""
        locks = self._root / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(locks / digest, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


@contextmanager
def _translated(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SnapshotError(f"cannot write {target}: {error.strerror or error}") from error
