"""Our commands as processes of their own, forked from one that has imported the libraries.

Importing torch and transformers takes five CPU seconds, most of what a short command does, and every process
of the tests would do it again. That the command starts from nothing is tested in tests/flows/test_cli.py.
"""

import atexit
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]

_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(
    [
        "flows.cli",
        "opentinker_core.runtime.session",
        "opentinker_core.service.app",
        "opentinker_core.service.core",
        "transformers.models.llama.modeling_llama",  # the tiny model's
        "pandas",  # which pyarrow imports where it writes
    ]
)
"""Nothing of Prefect or MLflow, which read the environment when they are imported."""


class Program:
    """A process that runs `main()` of a module; what is used of the interface of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        module: str = "flows.cli",
        stderr: Path | None = None,
    ) -> None:
        """Start it in the project's root.

        Args:
            environment: instead of this process's.
            stderr: a file; else it can be read from `self.stderr`.
        """
        out, out_of_child = _FORK.Pipe(duplex=False)
        error, error_of_child = _FORK.Pipe(duplex=False)
        variables = dict(os.environ if environment is None else environment)
        self._process = _FORK.Process(
            target=_main,
            args=(module, list(arguments), variables, out_of_child, error_of_child, stderr),
            daemon=False,
        )
        self._process.start()
        for end in (out_of_child, error_of_child):
            end.close()
        self.stdout, self.stderr = _stream(out), _stream(error)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or the number of the signal that ended it, negative; None: it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """See `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once there is one.

        Raises:
            subprocess.TimeoutExpired: it runs still after `timeout` seconds.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it prints from now on to stdout and stderr, and wait for its end."""
        with ThreadPoolExecutor(2) as readers:
            out, error = readers.submit(self.stdout.read), readers.submit(self.stderr.read)
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            return out.result(), error.result()

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs still."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.stdout.close()
        self.stderr.close()


def run(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, *, module: str = "flows.cli"
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    with Program(arguments, environment, module=module) as program:
        out, error = program.communicate(PATIENCE_S)
        return subprocess.CompletedProcess(list(arguments), program.wait(), out, error)


def _stream(connection: Connection) -> TextIO:
    stream = os.fdopen(os.dup(connection.fileno()), encoding="utf-8")
    connection.close()
    return stream


def _main(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    out: Connection,
    error: Connection,
    error_file: Path | None,
) -> None:
    """In the new process: be what `python -m module arguments` would be."""
    if error_file is not None:
        descriptor = os.open(error_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    else:
        os.dup2(error.fileno(), 2)
    os.dup2(out.fileno(), 1)
    out.close()
    error.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["opentinker", *arguments]
    try:
        importlib.import_module(module).main()
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
