"""`opentinker serve` as a process, for tests that stop and kill it."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinker

from tests import programs
from tests.programs import ROOT, Program

__all__ = ["ROOT", "Server", "command", "environment", "serve"]


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Variables of an installation of its own."""
    mine = {"OPENTINKER_HOME": str(home), "OMP_NUM_THREADS": "1", **variables}
    return {**os.environ, **mine}


def command(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `opentinker` to its end."""
    return programs.run(arguments, environment(home, **variables))


@dataclass
class Server:
    """A server that takes work."""

    process: Program
    said: dict[str, Any]
    """What it printed when it started."""
    log: Path

    @property
    def url(self) -> str:
        return str(self.said["url"])

    def client(self, key: str | None = None) -> tinker.ServiceClient:
        """The official SDK's, with this key or the first one."""
        return tinker.ServiceClient(base_url=self.url, api_key=key or self.said["key"])

    def lines(self) -> list[dict[str, Any]]:
        """What it logged."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def end(self, number: signal.Signals = signal.SIGTERM, within: float = 60) -> int:
        """Send a signal; gives the exit code."""
        self.process.send_signal(number)
        return self.process.wait(within)


@contextmanager
def serve(home: Path, *arguments: str, **variables: str) -> Iterator[Server]:
    """A server, killed at the end of the block if it runs still."""
    home.mkdir(exist_ok=True)
    log = home / f"log-{time.monotonic_ns()}"
    with Program(["serve", "--json", *arguments], environment(home, **variables), stderr=log) as process:
        try:
            line = process.stdout.readline()
            assert line, log.read_text()
            yield Server(process, json.loads(line), log)
        finally:
            process.kill()
