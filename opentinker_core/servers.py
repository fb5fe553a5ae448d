"""Server processes that belong to a command: started with it, and gone with it, however it ends.

Each runs under a guard that waits for the end of its standard input. The kernel closes that pipe
when this process ends, by `kill -9` too, so no server outlives the command that started it.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.niceness import set_session_nice

STARTUP_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Server:
    """A child process (in a session of its own) with its log file; `url` is empty for a worker."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """End the process and its children: SIGTERM, then SIGKILL; returns when they are gone."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(STOP_TIMEOUT_S)

    def give_way(self, nice: int) -> None:
        """Be nicer by `nice` than this process from now on: what it does after it answered can wait."""
        niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + nice)
        for command in psutil.Process(self.process.pid).children():  # the leader of its group and session
            os.setpriority(os.PRIO_PGRP, command.pid, niceness)
            set_session_nice(nice, command.pid)

    def reason(self) -> str:
        """What the log says last: the message of an exception, if there is one."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = [line for line in lines if line.strip() and not line.startswith((" ", "Traceback"))]
        errors = [line for line in said if "Error" in line]
        return (errors or said or ["it said nothing"])[-1][:500]


def start(
    name: str,
    command: Sequence[str],
    *,
    url: str,
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> Server:
    """Start `command` under a guard, with output to `log`. Does not wait until it answers.

    Raises:
        OSError: the log cannot be written.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "opentinker_core.guard", *command],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **python_path(), **(environment or {})},
            start_new_session=True,  # Ctrl-C is for us; we then end our servers in order
        )
    return Server(name, url, log, process)


def wait_until_healthy(
    servers: Sequence[tuple[Server, str]],
    timeout_s: float = STARTUP_TIMEOUT_S,
    tick: Callable[[list[str]], None] = lambda waiting: None,
) -> None:
    """Wait until every server answers on its health path; `tick` is told who is waited for.

    Raises:
        OpenTinkerError: one ended, or did not answer in time; with the end of its log.
    """
    deadline = time.monotonic() + timeout_s
    waiting = list(servers)
    while waiting:
        tick([server.name for server, _ in waiting])
        for server, _ in waiting:
            if not server.running:
                raise OpenTinkerError(
                    f"the {server.name} server ended at start: {server.reason()} (log: {server.log})"
                )
        waiting = [(server, path) for server, path in waiting if not answers(server.url + path)]
        if waiting and time.monotonic() > deadline:
            server = waiting[0][0]
            raise OpenTinkerError(
                f"the {server.name} server did not answer at {server.url} within {timeout_s:.0f} s; "
                f"log: {server.log}"
            )
        if waiting:
            time.sleep(0.05)


def answers(url: str, timeout_s: float = 3.0) -> bool:
    """Whether an HTTP server answers at `url`, with whatever status below 500."""
    if not url.startswith(("http://", "https://")):
        return False
    try:
        with urllib.request.urlopen(url, timeout=timeout_s):  # noqa: S310 - http(s) only
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (OSError, ValueError):
        return False


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_port(option: str, port: int, host: str = "127.0.0.1") -> None:
    """Refuse a port that cannot be listened on.

    Raises:
        UsageError: names the option, the port and what to do.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"{option}: port {port} of {host} cannot be used ({error.strerror}); accepted: a free port"
            ) from error


def python_path() -> dict[str, str]:
    """Environment under which a child, in any directory, imports the same code as this process."""
    root = str(Path(__file__).resolve().parent.parent)
    existing = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != root]
    return {"PYTHONPATH": os.pathsep.join([root, *existing])}


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end us as Ctrl-C does, which a shell may have turned off for background jobs."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _ENDINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
