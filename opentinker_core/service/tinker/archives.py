"""Tar archives of directories, made while they are sent."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

_PIECE = 1 << 20


def tar_of(directory: Path) -> tuple[int, Iterator[bytes]]:
    """The size of the archive of a directory's files, and the archive in pieces."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    headers = [_header(path) for path in files]
    size = sum(
        len(header) + _padded(path.stat().st_size) for header, path in zip(headers, files, strict=True)
    )
    return size + 2 * tarfile.BLOCKSIZE, _pieces(files, headers)


def _pieces(files: list[Path], headers: list[bytes]) -> Iterator[bytes]:
    for path, header in zip(files, headers, strict=True):
        yield header
        size = 0
        with path.open("rb") as stream:
            while piece := stream.read(_PIECE):
                size += len(piece)
                yield piece
        yield bytes(_padded(size) - size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(path: Path) -> bytes:
    info = tarfile.TarInfo(path.name)
    info.size = path.stat().st_size
    return info.tobuf(tarfile.PAX_FORMAT)


def _padded(size: int) -> int:
    return size + -size % tarfile.BLOCKSIZE
