"""The one reasoning-gym helper process of this process: started when first needed, ended with it."""

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from typing import Any


class HelperEndedError(RuntimeError):
    """The helper process ended without an answer."""


_lock = threading.Lock()
_process: "HelperProcess | None" = None


class HelperProcess:
    """A running `envs.reasoning_gym_worker` and its pipes."""

    def __init__(self) -> None:
        environment = os.environ | {
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),  # noqa: PTH100
        }
        # -P: modules of the working directory must not hide the real ones
        command = [sys.executable, "-P", "-m", "envs.reasoning_gym_worker"]
        self.owner = os.getpid()
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )

    @property
    def alive(self) -> bool:
        """Whether it can be asked by this process (not by one that was forked from it)."""
        return self.owner == os.getpid() and self._popen.poll() is None

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            TimeoutError: no answer in `seconds`; the process was killed.
            HelperEndedError: the process ended.
        """
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        try:
            self._popen.stdin.write(json.dumps(request).encode() + b"\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        answer = b""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._popen.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.close()
                    raise TimeoutError(f"reasoning-gym gave no answer in {seconds:g} s")
                part = os.read(self._popen.stdout.fileno(), 1 << 16)
                if not part:
                    raise self._ended()
                answer += part
        return json.loads(answer)

    def close(self) -> None:
        """Kill the process, if it is this process's own."""
        if self.owner == os.getpid():
            self._popen.kill()
            self._popen.wait()
            for pipe in (self._popen.stdin, self._popen.stdout):
                if pipe is not None:
                    pipe.close()

    def _ended(self) -> HelperEndedError:
        code = self._popen.wait()
        self.close()
        return HelperEndedError(f"the reasoning-gym helper process ended with exit code {code}")


def ask(request: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Ask this process's helper, starting one if there is none.

    Raises:
        TimeoutError: no answer in `seconds`; the next request gets a new helper.
        HelperEndedError: a helper started for this very request ended.
    """
    with _lock:
        if _process is not None and _process.alive:
            try:
                return _process.ask(request, seconds)
            except HelperEndedError:
                pass  # killed from outside since its last answer: requests are self-contained, ask anew
        return _started().ask(request, seconds)


def _started() -> HelperProcess:
    global _process
    _process = HelperProcess()
    atexit.register(_process.close)
    return _process
