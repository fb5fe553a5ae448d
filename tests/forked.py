"""Programs as they are, each in a process forked from one that has imported the libraries they need.

    python -m tests.forked LIBRARY ...

imports the libraries, then runs a program for each JSON object on its input: `run` (the path of a script, or
a module), `arguments`, `directory`, `environment` (what is added), `stdout` and `stderr` (files), and
`watched` (modules). At the program's end it prints a JSON object with the exit code and those of the watched
modules that were imported. What it saves is the imports, and the end of a Python that has imported so much,
seconds each. tests/programs.py does it for our own command.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Done:
    """A program that has ended."""

    returncode: int
    """The exit code, or the number of the signal that ended it, negative."""
    stdout: str
    stderr: str
    imported: tuple[str, ...]
    """Those of the watched modules that it imported; none are known of one that was killed."""


class Forks:
    """The process to fork from."""

    def __init__(self, process: "subprocess.Popen[str]", scratch: Path) -> None:
        self._process, self._scratch = process, scratch

    def run(
        self,
        program: str | Path,
        *arguments: object,
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
        watched: Sequence[str] = (),
    ) -> Done:
        """Run a program to its end, with `environment` besides the variables of this process's start."""
        files = {name: self._scratch / name for name in ("stdout", "stderr")}
        wanted = {
            "run": str(program),
            "arguments": [*map(str, arguments)],
            "directory": str(directory or Path.cwd()),
            "environment": dict(environment or {}),
            "watched": [*watched],
            **{name: str(path) for name, path in files.items()},
        }
        assert self._process.stdin is not None
        print(json.dumps(wanted), file=self._process.stdin, flush=True)
        ended = json.loads(self._line())
        said = {name: path.read_text(encoding="utf-8", errors="replace") for name, path in files.items()}
        return Done(ended["returncode"], imported=tuple(ended["imported"]), **said)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process to fork from has ended"
        return line


@contextmanager
def forks(*libraries: str, environment: Mapping[str, str] | None = None) -> Iterator[Forks]:
    """A process that has imported `libraries`; killed at the end of the block with what it runs.

    Args:
        environment: instead of this process's.
    """
    with TemporaryDirectory(prefix="opentinker-forks-") as scratch:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", *libraries],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield Forks(process, Path(scratch))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _become(wanted: dict[str, Any]) -> None:
    """In the new process: be what `python` with the program and its arguments would be."""
    new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, path in enumerate((os.devnull, wanted["stdout"], wanted["stderr"])):
        descriptor = os.open(path, new if number else os.O_RDONLY, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update(wanted["environment"])
    os.chdir(wanted["directory"])
    program = wanted["run"]
    sys.argv = [program, *wanted["arguments"]]
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    else:
        sys.path[0] = wanted["directory"]
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _run(wanted: dict[str, Any]) -> int:
    """The exit code that Python would end with."""
    try:
        _become(wanted)
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            return ending.code or 0
        print(ending.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 - the traceback of a program that failed
        traceback.print_exc()
        return 1
    return 0


def _end(wanted: dict[str, Any], told: int) -> NoReturn:
    """Do what `wanted` says and end, without a collection of all that was imported."""
    code = _run(wanted)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    imported = [name for name in wanted["watched"] if name in sys.modules]
    os.write(told, json.dumps(imported).encode())
    os._exit(code)


def main(*libraries: str) -> None:
    for library in libraries:
        importlib.import_module(library)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        wanted = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            _end(wanted, writing)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            imported = pipe.read()
        _, status = os.waitpid(child, 0)
        ended = {"returncode": os.waitstatus_to_exitcode(status), "imported": json.loads(imported or "[]")}
        print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
