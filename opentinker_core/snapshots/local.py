"""A blob store on a local (or network-mounted) POSIX file system."""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from opentinker_core.snapshots.blobs import BlobError, BlobMissingError, check_key

_STAGING = ".staging"  # not a safe name, so no key can reach it
_STALE_SECONDS = 24 * 3600


class LocalBlobStore:
    """Files below `root`; staged beside them, flushed to disk, then made visible by link or rename."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.uri = self.root.as_uri()
        self._swept = False

    def put(self, key: str, source: Path | bytes) -> None:
        self._write(key, source, _replace)

    def put_if_absent(self, key: str, source: Path | bytes) -> bool:
        return not self.exists(key) and self._write(key, source, _link_if_absent)

    def read(self, key: str) -> bytes:
        path = self.local_path(key)
        with _translated("read", path):
            return path.read_bytes()

    def get(self, key: str, target: Path) -> None:
        path = self.local_path(key)
        reading, writing = _translated("read", path), _translated("write", target)
        with reading, path.open("rb") as stream, writing, target.open("wb") as copy:
            shutil.copyfileobj(stream, copy, 1 << 20)

    def exists(self, key: str) -> bool:
        path = self.local_path(key)
        with _translated("read", path):
            return path.is_file()

    def delete(self, key: str) -> None:
        path = self.local_path(key)
        with _translated("delete", path):
            path.unlink(missing_ok=True)
        self._prune(path.parent)

    def local_path(self, key: str) -> Path:
        return self.root / check_key(key)

    def list(self, folder: str = "") -> list[str]:
        top = self.local_path(folder) if folder else self.root
        with _translated("read", top):
            found = [path for path in top.rglob("*") if path.is_file()]
        keys = (path.relative_to(self.root) for path in found)
        return sorted(key.as_posix() for key in keys if key.parts[0] != _STAGING)

    def _write(self, key: str, source: Path | bytes, show: Callable[[Path, Path], bool]) -> bool:
        """Stage the content, then `show(staged, target)` it in one step; what `show` returned."""
        target = self.local_path(key)
        with self._staged(target, source) as staged, _translated("write", target):
            # A concurrent `delete` may remove the folder again before the file is in it.
            for attempt in range(20):
                _make_folder(target.parent)
                try:
                    shown = show(staged, target)
                    break
                except FileNotFoundError:
                    if attempt == 19:
                        raise
            _flush_folder(target.parent)
        return shown

    @contextmanager
    def _staged(self, target: Path, source: Path | bytes) -> Iterator[Path]:
        staged = self.root / _STAGING / secrets.token_hex(16)
        try:
            with _translated("write", target):
                _make_folder(staged.parent)
                self._sweep()
                _write_flushed(staged, source)
            yield staged
        finally:
            with suppress(OSError):
                staged.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Once an instance: remove what killed writers left behind long ago."""
        if self._swept:
            return
        self._swept = True
        for path in (self.root / _STAGING).iterdir():
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()

    def _prune(self, folder: Path) -> None:
        """Remove the folders that a deletion left empty."""
        with suppress(OSError):
            while folder != self.root:
                folder.rmdir()
                folder = folder.parent


@contextmanager
def _translated(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise BlobMissingError(f"cannot {action} {path}: there is no such file") from error
    except OSError as error:
        raise BlobError(f"cannot {action} {path}: {error.strerror or error}") from error


def _replace(staged: Path, target: Path) -> bool:
    staged.replace(target)
    return True


def _link_if_absent(staged: Path, target: Path) -> bool:
    try:
        target.hardlink_to(staged)
    except FileExistsError:
        return False
    return True


def _write_flushed(target: Path, source: Path | bytes) -> None:
    with target.open("xb") as stream:
        if isinstance(source, bytes):
            stream.write(source)
        else:
            with _translated("read", source):
                original = source.open("rb")
            with original:
                shutil.copyfileobj(original, stream, 1 << 20)
        stream.flush()
        os.fsync(stream.fileno())


def _make_folder(folder: Path) -> None:
    """Create `folder` and its parents so that they survive a power cut."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _flush_folder(folder.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
