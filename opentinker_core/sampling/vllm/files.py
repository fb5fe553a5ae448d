"""The directories that vLLM reads adapters from: one a version, written once, private to one client."""

import fcntl
import os
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from opentinker_core.errors import OpenTinkerError
from opentinker_core.lora.adapter import Adapter
from opentinker_core.sampling.vllm.adapters import check_adapter, write_for_vllm, write_zero

FetchSnapshot = Callable[[str, str], Path]
ReadAdapter = Callable[[Path], Adapter]
_KEPT = 8
"""Discarded directories that are kept a while: a request that was given up may still be running."""


class AdapterFiles:
    """Directories below `root`, which the servers must be able to read at the same path."""

    def __init__(
        self,
        root: Path,
        fetch: FetchSnapshot,
        read_adapter: ReadAdapter,
        *,
        base_model: str,
        dtype: str,
        max_rank: int,
        linear: tuple[str, int, int],
    ) -> None:
        """`linear` is the (name, K, N) of any one layer, for the adapter that changes nothing.

        Raises:
            OpenTinkerError: `root` cannot be written.
        """
        self._fetch, self._read_adapter = fetch, read_adapter
        self._base_model, self._dtype, self._max_rank, self._linear = base_model, dtype, max_rank, linear
        self._discarded: deque[Path] = deque()
        try:
            root.mkdir(parents=True, exist_ok=True)
            turn = _hold(root, wait=True)  # or another's sweep would take what is made and not yet held
            _sweep(root)
            self._directory = Path(mkdtemp(prefix="client-", dir=root))
            self._directory.chmod(0o755)
            self._lock = _hold(self._directory)
            os.close(turn)
        except OSError as error:
            raise OpenTinkerError(f"{root}: cannot be written: {error}") from error
        self.client = self._directory.name.removeprefix("client-")
        """A name that no other client has or had."""

    def write(self, name: str, uri: str, digest: str) -> Path:
        """The directory of a version's adapter, from its verified snapshot.

        Raises:
            SnapshotError: the snapshot is missing or corrupt.
            UsageError: vLLM would not sample it rightly.
            OpenTinkerError: the adapter cannot be read, or the directory not be written.
        """
        adapter = self._read_adapter(self._fetch(uri, digest))
        check_adapter(adapter, self._max_rank)
        target = self._directory / name
        try:
            shutil.rmtree(target, ignore_errors=True)
            write_for_vllm(adapter, target, self._base_model, self._dtype)
        except OSError as error:
            raise OpenTinkerError(f"{target}: cannot be written: {error}") from error
        return target

    def write_zero(self, name: str) -> Path:
        """The directory of an adapter that changes nothing."""
        target = self._directory / name
        write_zero(self._linear, target, self._base_model, self._dtype)
        return target

    def discard(self, directory: Path) -> None:
        """Remove a directory, a little later."""
        self._discarded.append(directory)
        while len(self._discarded) > _KEPT:
            shutil.rmtree(self._discarded.popleft(), ignore_errors=True)

    def close(self) -> None:
        """Remove all of them."""
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._lock)


def _hold(directory: Path, wait: bool = False) -> int:
    """Lock a directory until the descriptor is closed or this process ends."""
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sweep(root: Path) -> None:
    """Remove what clients left behind that were killed."""
    for directory in root.glob("client-*"):
        try:
            descriptor = _hold(directory)
        except OSError:  # it lives
            continue
        shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)
