"""The scratch folder of a sandbox session: measured while code runs in it, and removed whatever it holds.

The code may be hostile: it can nest folders deeper than a path can say, take away the rights to them,
and make files faster than they are counted.
"""

import os
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path


def make() -> Path:
    """A new empty folder that only its owner can enter."""
    return Path(tempfile.mkdtemp(prefix="opentinker-scratch-")).resolve()


def excess(folder: Path, max_bytes: int, max_entries: int) -> str | None:
    """What is too much in a folder that may change meanwhile, or None; it stops counting there."""
    total, entries, waiting = 0, 0, [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as found:
                for entry in found:
                    stat = entry.stat(follow_symlinks=False)
                    total += max(stat.st_size, stat.st_blocks * 512)
                    entries += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    if total > max_bytes:
                        return f"more than {max_bytes} bytes in files"
                    if entries > max_entries:
                        return f"more than {max_entries} files and folders"
        except FileNotFoundError:
            continue  # removed since it was listed
        except OSError as error:
            return f"a folder that cannot be looked into ({error.strerror})"
    return None


def empty(folder: Path) -> None:
    """Remove everything in `folder`, which no process uses any more. Symbolic links are not followed.

    Folders are lifted to the top before they are looked into, so that no path is longer than three
    names and depth costs no recursion.
    """
    names = count()
    while folders := _without_files(folder):
        for path in folders:
            path.chmod(0o700)
            for inner in _without_files(path):
                inner.chmod(0o700)  # moving a folder writes its `..`
                inner.rename(_free(folder, names))
            path.rmdir()


def _free(folder: Path, names: Iterator[int]) -> Path:
    """A name that nothing in `folder` has."""
    return next(path for number in names if not os.path.lexists(path := folder / f"lifted-{number}"))


def remove(folder: Path, owner: int) -> None:
    """Remove the folder too, in the process `owner` and in no fork of it; it may be gone already."""
    if os.getpid() == owner and folder.exists():
        empty(folder)
        folder.rmdir()


def _without_files(folder: Path) -> list[Path]:
    """The folders in it, once everything else is removed."""
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        if not entry.is_dir(follow_symlinks=False):
            Path(entry.path).unlink()
    return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
