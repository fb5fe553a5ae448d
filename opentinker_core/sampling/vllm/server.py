"""A vLLM server of our own: started on the loopback address, watched, started again when it ends.

It runs under the guard of `opentinker_core.servers`, so it ends with this process, however that ends.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from opentinker_core.errors import OpenTinkerError
from opentinker_core.sampling.vllm.command import Launch
from opentinker_core.servers import Server, answers, start

logger = logging.getLogger(__name__)

_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (\w+ [\d-]+ [\d:]+ \[[^\]]+\])?")
_ERROR = re.compile(r"[\w.]*(Error|Exception): |\S+: error: ")
_ECHOES = ("EngineDeadError", "Engine core initialization failed")
_PATIENCE = 5
"""Starts in a row that may fail before the server is given up."""
_LONGEST_PAUSE_S = 30.0
_DEAF_S = 120.0
"""A server that runs and has not answered for so long is ended and started again."""


class VLLMServer:
    """One server at a fixed URL. `start`, then `wait_until_ready`, at the end `stop`."""

    def __init__(self, launch: Launch, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.restarts = 0
        self._launch = launch
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._server: Server | None = None
        self._failure: str | None = None
        self._ready = False
        self._watcher = threading.Thread(target=self._watch, name=f"vllm-{port}", daemon=True)

    def start(self) -> None:
        """Start the process and the thread that watches it; does not wait until it answers."""
        self._begin()
        self._watcher.start()

    @property
    def failure(self) -> str | None:
        """Why the server was given up, if it was."""
        return self._failure

    @property
    def pid(self) -> int:
        """The process id of the guard above the server."""
        assert self._server is not None
        return self._server.process.pid

    def stop(self) -> None:
        """End the server; returns when its processes are gone. Idempotent."""
        self._ending.set()
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.stop()

    def _begin(self) -> None:
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".previous.log"))
        with self._lock:
            if self._ending.is_set():
                return
            self._server = start(
                "vLLM",
                self._launch.command,
                url=self.url,
                log=self.log,
                environment=self._launch.environment,
            )

    def _watch(self) -> None:
        failed, heard = 0, time.monotonic()
        while not self._ending.wait(0.5):
            server = self._server
            if server is None:
                return
            if not server.running:
                failed = 1 if self._ready else failed + 1
                self._ready = False
                why = reason(self.log)
                if failed >= _PATIENCE:
                    self._failure = f"it ended {failed} times in a row: {why} (log: {self.log})"
                    logger.error("vLLM at %s is given up: %s", self.url, self._failure)
                    return
                logger.warning("vLLM at %s ended (%s); it is started again", self.url, why)
                if self._ending.wait(min(_LONGEST_PAUSE_S, 2.0 ** (failed - 1))):
                    return
                self.restarts += 1
                self._begin()
                heard = time.monotonic()
            elif answers(f"{self.url}/health"):
                self._ready, heard = True, time.monotonic()
                self._ending.wait(2.0)
            elif self._ready and time.monotonic() - heard > _DEAF_S:
                logger.warning("vLLM at %s does not answer; it is started again", self.url)
                server.stop()


def wait_until_ready(
    servers: Sequence[VLLMServer], timeout_s: float, tick: Callable[[int], None] = lambda ready: None
) -> None:
    """Wait until every server answers; `tick` is told how many do.

    Raises:
        OpenTinkerError: one ended at its start, or did not answer in time; with the end of its log.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        ready = [answers(f"{server.url}/health") for server in servers]
        tick(sum(ready))
        if all(ready):
            return
        for server, is_ready in zip(servers, ready, strict=True):
            if server.failure or (server.restarts and not is_ready):
                # At the first start nothing is gained by trying again: the same will be wrong.
                previous = server.log.with_suffix(".previous.log")
                log = previous if previous.exists() else server.log
                raise OpenTinkerError(f"the vLLM server ended at its start: {reason(log)} (log: {log})")
        if time.monotonic() > deadline:
            late = servers[ready.index(False)]
            raise OpenTinkerError(
                f"the vLLM server did not answer at {late.url} within {timeout_s:.0f} s (log: {late.log})"
            )
        time.sleep(0.2)


def reason(log: Path) -> str:
    """What ended a server, as far as its log tells: the last error that is not only of another's end."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [_PREFIX.sub("", line).strip() for line in lines]
    errors = [line for line in said if _ERROR.match(line) and not any(word in line for word in _ECHOES)]
    return (errors or [line for line in said if line] or ["it said nothing"])[-1][:500]
