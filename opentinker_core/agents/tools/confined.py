"""The inside of the sandbox: a process of its own runs this file, which locks itself in and then runs the
code.

Started by `sandbox.py` as `python -P -s -S -B confined.py FD`, with an empty scratch folder as its
working directory and a request (JSON) as its standard input. It imports nothing but the standard
library. Whatever layer cannot be put in place ends the process before the code is looked at; once all
are, it says so on the file descriptor FD.

The layers, in order:

1. no dump, death with the parent   no core file; nobody's memory is read; nothing outlives a killed trainer
2. resource limits                  CPU time, address space, size of a file, open files, processes, core files
3. no new privileges                set-uid programs give none; ordinary users need it for 4 and 6
4. Landlock                         no file beyond the scratch folder and the interpreter's own (read-only);
                                    where the kernel knows these: no TCP, abstract sockets, signals to others
5. no capabilities                  root in here is a user like any other
6. seccomp                          a list of system calls that are possible; all others fail
"""

import ctypes
import json
import os
import resource
import sys
from types import ModuleType
from typing import Any

CONFINED = b"confined"
CODE_NAME = "<code>"

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_SIGKILL = 9
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_RULE_PATH_BENEATH = 1
_CAPABILITY_VERSION_3 = 0x20080522


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scope", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def main() -> None:
    """Read the request, lock up, run."""
    ready = int(sys.argv[1])
    with os.fdopen(0, "rb") as stdin:
        request = json.load(stdin)
    os.open(os.devnull, os.O_RDONLY)  # takes the place of 0: the code's standard input is empty
    os.umask(0o077)
    os.environ.clear()
    confine(request)
    os.write(ready, CONFINED)
    os.close(ready)
    _run(request["code"])


def confine(request: dict[str, Any]) -> None:
    """Put every layer in place that the request names; `landlock` and `seccomp` may be null.

    Raises:
        OSError: one was refused; the process must end then.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _prctl(libc, _PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != request["parent"]:  # it was gone before that took hold
        raise ProcessLookupError("the parent of this sandbox has ended")
    _prctl(libc, _PR_SET_DUMPABLE, 0)
    for name, value in request["limits"].items():
        _limit(getattr(resource, name), value)
    _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1)
    if request["landlock"] is not None:
        _landlock(libc, **request["landlock"])
    _drop_capabilities(libc)
    if request["seccomp"] is not None:
        _seccomp(libc, bytes.fromhex(request["seccomp"]))


def _limit(kind: int, value: int) -> None:
    """Set a resource's limit for good, or leave a lower one that holds already."""
    highest = resource.getrlimit(kind)[1]
    if highest != resource.RLIM_INFINITY:
        value = min(value, highest)
    resource.setrlimit(kind, (value, value))


def _prctl(libc: ctypes.CDLL, option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _done(libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl({option})")


def _landlock(libc: ctypes.CDLL, files: int, net: int, scope: int, rules: list[tuple[str, int]]) -> None:
    """Forbid the rights (bits) in `files`, `net` and `scope`, but for those of each path of `rules`."""
    attributes = _RulesetAttributes(files, net, scope)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(attributes), size, 0)
    _done(ruleset, "landlock_create_ruleset")
    for path, rights in rules:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = _PathBeneath(rights, folder)
        added = libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, ctypes.byref(rule), 0)
        _done(added, f"landlock_add_rule({path})")
        os.close(folder)
    _done(libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """None effective, permitted or inheritable: two words of each."""
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    _done(libc.capset(ctypes.byref(header), none), "capset")


def _seccomp(libc: ctypes.CDLL, program: bytes) -> None:
    """Install a filter; instructions are 8 bytes each."""
    instructions = ctypes.create_string_buffer(program, len(program))
    wrapped = _FilterProgram(len(program) // 8, ctypes.addressof(instructions))
    mode = ctypes.c_ulong(_SECCOMP_MODE_FILTER)
    _done(libc.prctl(_PR_SET_SECCOMP, mode, ctypes.byref(wrapped)), "prctl(PR_SET_SECCOMP)")


def _done(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _run(code: str) -> None:
    """Run the code as a fresh `__main__`; an exception is printed as usual, and ends with status 1."""
    main_module = ModuleType("__main__")
    sys.modules["__main__"] = main_module
    sys.argv = [""]
    sys.path.append(os.getcwd())  # noqa: PTH109 - pathlib takes long to import
    try:
        exec(compile(code, CODE_NAME, "exec"), main_module.__dict__)  # noqa: S102 - this is the tool
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, the model is told
        import linecache
        import traceback

        lines = code.splitlines(keepends=True)
        linecache.cache[CODE_NAME] = (len(code), None, lines, CODE_NAME)
        ours = error.__traceback__  # the frame of this function, above those of the code
        traceback.print_exception(type(error), error, ours.tb_next if ours else None)
        sys.exit(1)


if __name__ == "__main__":
    main()
