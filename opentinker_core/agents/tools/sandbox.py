"""A tool that runs Python code which nobody has read, in a process that can reach nothing but a scratch
folder.

Every call is a process of its own, made by `confined.py`, which lists the layers; `landlock.py` and
`seccomp.py` say what those two let through. From here come the wall clock, the limits of output and of
the scratch folder, and the end of the process. Calls of one tool share the scratch folder, and nothing
else: one tool is one agent's in one episode.

It is not weaker than it says: where the kernel lacks a layer there is no tool, unless the settings name
that layer in `may_lack`.
"""

import json
import logging
import os
import platform
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from pydantic import Field

from opentinker_core.agents.tools import confined, landlock, scratch, seccomp
from opentinker_core.agents.tools.protocol import (
    Arguments,
    Deadline,
    ToolError,
    ToolResult,
    checked,
    schema_of,
)
from opentinker_core.config.tools import Layer, SandboxSettings
from opentinker_core.errors import OpenTinkerError

_LOG = logging.getLogger(__name__)
_LOOK_S = 0.05
"""How often the scratch folder is measured while code runs."""

_OPTIONS = ("-P", "-s", "-S", "-B", "-u", "-X", "utf8")
"""No installed packages, nothing written beside the standard library, output as it comes, UTF-8."""

_ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""All that the interpreter is told (the code sees none): sets have the same order in every call."""


class SandboxError(OpenTinkerError):
    """Code cannot be run safely here: nothing was run."""


class PythonArguments(Arguments):
    """What the tool takes."""

    code: str = Field(min_length=1, max_length=100_000, description="Python; print what you want to see")


class PythonTool:
    """A tool: the output of a Python program. Close it to remove its scratch folder.

    `layers` are those in force.
    """

    name = "python"
    description = (
        "Run a Python program and get what it prints. It has the standard library, and no network, processes "
        "or threads. Variables do not outlive a call; files in the working directory do."
    )
    queue = "python"  # its calls share files
    computes = True

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        """Look what the kernel offers, and make the scratch folder.

        Raises:
            SandboxError: it lacks a layer that the settings do not allow to lack, or it is not Linux.
        """
        self._settings = settings or SandboxSettings()
        self.layers = _layers(self._settings.may_lack)
        self._scratch = scratch.make()
        self._remove = weakref.finalize(self, scratch.remove, self._scratch, os.getpid())

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of its arguments."""
        return schema_of(PythonArguments)

    def close(self) -> None:
        """Remove the scratch folder; no call can follow."""
        self._remove()

    def __enter__(self) -> "PythonTool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, arguments: Mapping[str, Any], deadline: Deadline) -> ToolResult:
        """What the code printed, and why it ended if not by itself.

        Raises:
            SandboxError: the sandbox could not be set up, or is closed; the code was not run.
        """
        given = checked(PythonArguments, arguments)
        if isinstance(given, ToolResult):
            return given
        if not self._remove.alive:
            raise SandboxError("python: this tool is closed; accepted: calls before its end")
        deadline = deadline.sooner(self._settings.seconds)
        if deadline.remaining_s() <= 0:
            return ToolResult("Error: the time for the answer is over", ToolError.TIMED_OUT)
        return self._run(self._request(given.code, deadline), deadline)

    def _request(self, code: str, deadline: Deadline) -> bytes:
        settings, mib = self._settings, 1 << 20
        request = {
            "code": code,
            "parent": os.getpid(),
            "limits": {
                "RLIMIT_CPU": ceil(deadline.remaining_s()),
                "RLIMIT_AS": settings.memory_mib * mib,
                "RLIMIT_FSIZE": settings.file_mib * mib,
                "RLIMIT_NOFILE": settings.open_files,
                "RLIMIT_NPROC": 0,
                "RLIMIT_CORE": 0,
                "RLIMIT_MEMLOCK": 0,
            },
            "landlock": landlock.request(self._scratch) if "landlock" in self.layers else None,
            "seccomp": seccomp.program(platform.machine()).hex() if "seccomp" in self.layers else None,
        }
        return json.dumps(request).encode()

    def _run(self, request: bytes, deadline: Deadline) -> ToolResult:
        ready, ready_inside = os.pipe()
        try:
            with _stdin(request) as stdin:
                process = subprocess.Popen(
                    [sys.executable, *_OPTIONS, confined.__file__, str(ready_inside)],
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd=self._scratch,
                    env=_ENVIRONMENT,
                    pass_fds=(ready_inside,),
                    start_new_session=True,
                )
        except OSError as error:
            os.close(ready)
            raise SandboxError(f"python: the sandbox did not start: {error}") from error
        finally:
            os.close(ready_inside)
        with process, os.fdopen(ready, "rb") as confirmation:
            call = _Call(process, deadline, self._scratch, self._settings)
            stopped = call.watch()
            if confirmation.read() != confined.CONFINED and stopped is None:
                said = call.output().strip() or "it ended without a word"
                raise SandboxError(f"python: the sandbox was not set up: {said.splitlines()[-1]}")
        if call.is_over():
            scratch.empty(self._scratch)
        return _result(call.output(), process.returncode, stopped)


class _Call:
    """A running process, what it has written, and what it is stopped for."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", deadline: Deadline, folder: Path, settings: SandboxSettings
    ) -> None:
        self._process = process
        self._deadline, self._folder, self._settings = deadline, folder, settings
        self._written = bytearray()
        self._is_over = False

    def output(self) -> str:
        """What it wrote, up to the limit."""
        return bytes(self._written[: self._settings.output_bytes]).decode(errors="replace")

    def is_over(self) -> bool:
        """Whether the scratch folder held too much."""
        return self._is_over

    def watch(self) -> ToolResult | None:
        """Wait for its end, or bring it about: then why. Afterwards nothing of it runs any more."""
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        os.set_blocking(out, False)
        try:
            stopped = self._wait(out)
        finally:
            # It leads a group of its own; while it is not waited for, its number cannot belong to another.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._read(out)
        too_much = self._too_much()  # asked in any case: the next call shall find room
        return stopped or self._too_long() or too_much

    def _wait(self, out: int) -> ToolResult | None:
        look_at = time.monotonic()
        with selectors.DefaultSelector() as selector, os.fdopen(os.pidfd_open(self._process.pid)) as end:
            selector.register(out, selectors.EVENT_READ)
            selector.register(end.fileno(), selectors.EVENT_READ)
            while (left := self._deadline.remaining_s()) > 0:
                ready = {key.fd for key, _ in selector.select(min(left, _LOOK_S))}
                if out in ready and not self._read(out):
                    selector.unregister(out)
                if stopped := self._too_long():
                    return stopped
                if end.fileno() in ready:
                    return None
                if time.monotonic() >= look_at:
                    if stopped := self._too_much():
                        return stopped
                    look_at = time.monotonic() + _LOOK_S
        return ToolResult("Error: it took too long and was stopped", ToolError.TIMED_OUT)

    def _read(self, out: int) -> bool:
        """Take what it has written, a little more than is kept at the most; False: there will be no more."""
        try:
            while len(self._written) <= self._settings.output_bytes:
                if not (chunk := os.read(out, 65_536)):
                    return False
                self._written += chunk
        except BlockingIOError:
            pass
        return True

    def _too_long(self) -> ToolResult | None:
        limit = self._settings.output_bytes
        if len(self._written) <= limit:
            return None
        return ToolResult(f"Error: it wrote more than {limit} bytes and was stopped", ToolError.OVER_LIMIT)

    def _too_much(self) -> ToolResult | None:
        settings = self._settings
        excess = scratch.excess(self._folder, settings.scratch_mib << 20, settings.scratch_entries)
        if excess is None:
            return None
        self._is_over = True
        return ToolResult(
            f"Error: {excess}: it was stopped, and all files were removed", ToolError.OVER_LIMIT
        )


def _layers(may_lack: tuple[Layer, ...]) -> frozenset[Layer]:
    """The layers that this kernel has, if nothing is missing that may not be.

    Raises:
        SandboxError: something is.
    """
    if sys.platform != "linux":
        raise SandboxError(f"python: there is no sandbox on {sys.platform}; accepted: Linux")
    has: dict[Layer, bool] = {
        "landlock": landlock.abi() >= landlock.MINIMAL_ABI,
        "seccomp": seccomp.available(),
    }
    missing = sorted(layer for layer, there in has.items() if not there)
    if refused := [layer for layer in missing if layer not in may_lack]:
        raise SandboxError(
            f"python: this machine has no {' and no '.join(refused)} (Landlock ABI {landlock.abi()}, "
            f"{platform.machine()}), without which the sandbox is open; accepted: Linux 6.2 or newer with "
            f"Landlock and seccomp on x86_64 or aarch64, or may_lack: [{', '.join(missing)}] where you take "
            "that risk"
        )
    if missing:
        _LOG.warning("python: a weaker sandbox, as the settings allow: no %s", " and no ".join(missing))
    return frozenset(layer for layer, there in has.items() if there)


def _stdin(request: bytes) -> BinaryIO:
    """A file in memory to read it from: a pipe would have to be filled while the process may hang."""
    file = os.fdopen(os.memfd_create("request"), "w+b")
    file.write(request)
    file.seek(0)
    return file


def _result(output: str, status: int, stopped: ToolResult | None) -> ToolResult:
    if stopped is None and status < 0:
        stopped = _killed(-status)
    if stopped is not None:
        line = "" if not output or output.endswith("\n") else "\n"
        return ToolResult(f"{output}{line}{stopped.text}", stopped.error)
    if status > 0:
        return ToolResult(output or f"Error: exit status {status}", ToolError.FAILED)
    return ToolResult(output or "(no output)")


def _killed(number: int) -> ToolResult:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number in (signal.SIGKILL, signal.SIGXCPU):
        return ToolResult(f"Error: it took too much CPU time or memory ({name})", ToolError.OVER_LIMIT)
    return ToolResult(f"Error: the interpreter ended by {name}", ToolError.FAILED)
