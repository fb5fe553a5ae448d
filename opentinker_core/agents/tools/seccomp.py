"""Which system calls are possible in the sandbox, as a program for seccomp, the kernel's filter of them.

It is a list of what is possible; everything else fails with EPERM. So there are no sockets of any kind,
no processes and no threads (fork, vfork, clone, execve), no signals to anyone (kill, tgkill, and by
fcntl), no looking into others (ptrace, process_vm_readv), no mounts, namespaces, keys, BPF, io_uring,
and no changing of modes, owners, times and attributes of files, which Landlock does not check. Nor are
there symbolic or hard links, devices and named pipes.
"""

import ctypes
import platform
import struct
import sys
from functools import cache

_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # of the kernel's classic BPF
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # _FAIL: with errno EPERM, which is 1
_AT_NUMBER, _AT_ARCHITECTURE, _AT_ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
"""Column in the table, what the kernel calls it (AUDIT_ARCH), number of seccomp(2)."""
_SECCOMP_GET_ACTION_AVAIL = 2

_CALLS: dict[str, tuple[int | None, int | None]] = {  # x86_64, aarch64
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "lseek": (8, 62),
    "close": (3, 57),
    "close_range": (436, 436),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "flock": (73, 32),
    "ftruncate": (77, 46),
    "truncate": (76, 45),
    "fadvise64": (221, 223),
    "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    "open": (2, None),
    "openat": (257, 56),
    "stat": (4, None),
    "lstat": (6, None),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "umask": (95, 166),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "eventfd2": (290, 19),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "futex": (202, 98),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "getrandom": (318, 278),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "alarm": (37, None),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "pause": (34, None),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "getpriority": (140, 141),
    "getrusage": (98, 165),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "exit": (60, 93),
    "exit_group": (231, 94),
}

_CALLS_WITH: dict[str, tuple[tuple[int, int], int, tuple[int, ...]]] = {
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 4, 5, 6, 7, 1030)),  # duplicate, flags, locks; not F_SETOWN, F_SETSIG
    "ioctl": (
        (16, 29),
        1,
        (0x5401, 0x5413, 0x5421, 0x5450, 0x5451, 0x541B),
    ),  # is it a terminal, how large; flags
}
"""Calls that are possible if one argument (its place, from 0) has one of these values."""


def available() -> bool:
    """Whether this kernel filters system calls, on a machine whose calls are listed here."""
    if sys.platform != "linux" or platform.machine() not in _ARCHITECTURES:
        return False
    _, _, seccomp = _ARCHITECTURES[platform.machine()]
    action = ctypes.c_uint32(_FAIL & 0xFFFF0000)
    return ctypes.CDLL(None).syscall(seccomp, _SECCOMP_GET_ACTION_AVAIL, 0, ctypes.byref(action)) == 0


@cache
def program(machine: str) -> bytes:
    """The filter for a kind of machine: instructions of 8 bytes.

    A call of another architecture's table (32-bit calls on a 64-bit kernel) kills the process.

    Raises:
        KeyError: its system calls are not listed here.
    """
    column, architecture, _ = _ARCHITECTURES[machine]
    steps = [
        _step(_LOAD, _AT_ARCHITECTURE),
        _step(_JUMP_IF_EQUAL, architecture, then=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _AT_NUMBER),
    ]
    for numbers in _CALLS.values():
        if (number := numbers[column]) is not None:
            steps += [_step(_JUMP_IF_EQUAL, number, otherwise=1), _step(_RETURN, _ALLOW)]
    for both, argument, values in _CALLS_WITH.values():
        tests = [
            _step(_LOAD, _AT_ARGUMENTS + 8 * argument)
        ]  # the lower half: these arguments are 32 bits wide
        for value in values:
            tests += [_step(_JUMP_IF_EQUAL, value, otherwise=1), _step(_RETURN, _ALLOW)]
        tests.append(_step(_RETURN, _FAIL))
        steps += [_step(_JUMP_IF_EQUAL, both[column], otherwise=len(tests)), *tests]
    return b"".join([*steps, _step(_RETURN, _FAIL)])


def _step(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction; a jump skips so many of those that follow."""
    return struct.pack("=HBBI", code, then, otherwise, value)
