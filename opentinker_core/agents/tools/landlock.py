"""What the sandbox may do with files, as rules of Landlock, a security module of the Linux kernel.

Landlock checks the opening of files by any user, root included: what no rule allows is refused. It was
extended over time; the number of its interface (ABI) says what it knows. The first that keeps all
writing out is 3 (Linux 6.2). It does not hide that a file exists, how large it is and where a symbolic
link points.
"""

import ctypes
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

MINIMAL_ABI = 3

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1
_ABSTRACT_UNIX_SOCKET, _SIGNAL = 1 << 0, 1 << 1

_READ = _READ_FILE | _READ_DIR
_WRITE = _WRITE_FILE | _TRUNCATE | _REFER | _MAKE_REG | _MAKE_DIR | _REMOVE_FILE | _REMOVE_DIR
_SCRATCH = _READ | _WRITE
"""No right to make links, devices, pipes or sockets, nor to execute."""

_CREATE_RULESET, _VERSION = 444, 1


def abi() -> int:
    """The number of the kernel's Landlock; 0: it has none, or it is switched off."""
    if sys.platform != "linux":
        return 0
    return max(0, int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)))


def request(scratch: Path) -> dict[str, Any]:
    """What `confined.py` takes: all that this kernel can forbid, and what is allowed in spite of it."""
    number = abi()
    return {
        "files": (_IOCTL_DEV << 1) - 1 if number >= 5 else _IOCTL_DEV - 1,
        "net": _BIND_TCP | _CONNECT_TCP if number >= 4 else 0,
        "scope": _ABSTRACT_UNIX_SOCKET | _SIGNAL if number >= 6 else 0,
        "rules": [(str(scratch), _SCRATCH), *_interpreter()],
    }


@cache
def _interpreter() -> tuple[tuple[str, int], ...]:
    """What Python reads while it runs: its standard library, shared libraries, time zones, random bytes."""
    rules: dict[str, int] = {"/dev/null": _READ_FILE | _WRITE_FILE, "/dev/urandom": _READ_FILE}
    for name in ("stdlib", "platstdlib"):
        folder = Path(sysconfig.get_path(name))
        rules[str(folder)] = _READ_DIR  # imports list folders; of site-packages they learn the names
        rules.update({str(path): _reading(path) for path in folder.iterdir() if not _is_third_party(path)})
    rules.update({str(path): _READ_FILE for path in _shared_libraries()})
    for known in ("/etc/ld.so.cache", "/usr/share/zoneinfo"):
        if (path := Path(known)).exists():
            rules[known] = _reading(path)
    return tuple(rules.items())


def _reading(path: Path) -> int:
    return _READ if path.is_dir() else _READ_FILE


def _is_third_party(path: Path) -> bool:
    return path.name in ("site-packages", "dist-packages") or not path.exists()


def _shared_libraries() -> Iterator[Path]:
    """Those beside the C library and beside Python's: the standard library's modules load some of them."""
    folders = {Path(str(sysconfig.get_config_var("LIBDIR") or sys.base_prefix)).resolve()}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith(("libc.so", "libc-", "ld-", "libc.musl")):
            folders.add(path.parent)
    for folder in sorted(folders):
        yield from (path for path in folder.glob("*.so*") if path.is_file() and not path.is_symlink())
