"""The mutable states of policies on local disk: each replaced whole, whatever happens to the writer."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from opentinker_core.errors import NotFoundError
from opentinker_core.policies.residency.types import ResidencyError

T = TypeVar("T")

_STAGED = "staged"


class LocalStates:
    """A folder a key, `root/<SHA-256 of the key>`, in which the states are numbered directories.

    A state is written as `staged`, flushed to disk, then renamed to the next number. The highest number is
    the state; everything else in the folder is garbage, which the next save removes. So a kill or a
    power cut leaves the earlier state or the new one, and no pointer can dangle.
    """

    def __init__(self, root: Path) -> None:
        """Nothing is read or written yet."""
        self._root = root.absolute()

    def save(self, key: str, save: Callable[[Path], object]) -> None:
        """Replace the state of `key` by what `save` writes into the empty directory it is given.

        Raises:
            ResidencyError: it cannot be written (full, read-only); the earlier state is in place still.
        """
        with self._locked(key, "write", fcntl.LOCK_EX) as folder:
            number = _current(folder)
            _remove_all_but(folder, number)
            staged = folder / _STAGED
            try:
                staged.mkdir()
                save(staged)
                for path in (*staged.rglob("*"), staged):
                    _flush(path)
                staged.rename(folder / str(number + 1))
            finally:
                shutil.rmtree(staged, ignore_errors=True)
            _flush(folder)
            _remove_all_but(folder, number + 1)

    def load(self, key: str, load: Callable[[Path], T]) -> T:
        """What `load` makes of the directory of the state.

        Raises:
            NotFoundError: there is none.
            ResidencyError: it cannot be read.
        """
        if self.exists(key):
            with self._locked(key, "read", fcntl.LOCK_SH) as folder:
                if number := _current(folder):
                    return load(folder / str(number))
        raise NotFoundError(f"{key!r:.100}: no state below {self._root}")

    def exists(self, key: str) -> bool:
        """Whether there is a state to load."""
        folder = self._folder(key)
        return folder.is_dir() and _current(folder) > 0

    def drop(self, key: str) -> None:
        """Remove the state; nothing happens if there is none.

        Raises:
            ResidencyError: it cannot be removed.
        """
        with self._locked(key, "remove", fcntl.LOCK_EX) as folder:
            number = _current(folder)
            # The earlier ones first, and the current one in one step: none may come back to life.
            _remove_all_but(folder, number)
            if number:
                (folder / str(number)).rename(folder / _STAGED)
                _flush(folder)
                _remove_all_but(folder, 0)

    def _folder(self, key: str) -> Path:
        return self._root / hashlib.sha256(key.encode()).hexdigest()

    @contextmanager
    def _locked(self, key: str, action: str, kind: int) -> Iterator[Path]:
        """The folder of `key`, locked against other threads and processes.

        The folder is the lock, so it stays when its state is dropped. The kernel releases the lock of
        a process that dies.
        """
        folder = self._folder(key)
        try:
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                _flush(self._root)
                _flush(self._root.parent)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, kind)
                yield folder
            finally:
                os.close(descriptor)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ResidencyError(
                f"cannot {action} the state of {key!r:.100} in {folder}: {reason}"
            ) from error


def _current(folder: Path) -> int:
    """The number of the state; 0: there is none."""
    return max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=0)


def _remove_all_but(folder: Path, number: int) -> None:
    for path in folder.iterdir():
        if path.name != str(number):
            shutil.rmtree(path)


def _flush(path: Path) -> None:
    """Bring a file or a folder (its names, not what is in them) to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
