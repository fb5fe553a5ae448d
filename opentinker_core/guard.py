"""Run a command until it ends or standard input does: `python -m opentinker_core.guard COMMAND...`.

The end of standard input means that whoever started the guard is gone or wants the command
stopped; then the command's whole process group is ended. Should the guard itself be killed, the kernel
sends the command SIGTERM (on Linux).
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1

GRACE_S = 10.0
POLL_S = 0.05


def main(command: list[str]) -> int:
    """Run `command` in a process group of its own; returns its exit status."""
    end_with_us = _ask_for_sigterm_with_parent if sys.platform == "linux" else None
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_us
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=_wait_for_end_of_input, args=(stop,), daemon=True).start()
    while process.poll() is None and not stop.wait(POLL_S):
        pass
    status = _end(process)
    return status if status >= 0 else 128 - status


def _ask_for_sigterm_with_parent() -> None:
    """Between fork and exec of the command, while there is one thread."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _wait_for_end_of_input(stop: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stop.set()


def _end(process: "subprocess.Popen[bytes]") -> int:
    """End the group, children left behind by a finished leader included."""
    deadline = time.monotonic() + GRACE_S
    _signal_group(process.pid, signal.SIGTERM)
    while (process.poll() is None or _signal_group(process.pid, 0)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    _signal_group(process.pid, signal.SIGKILL)
    return process.wait()


def _signal_group(group: int, number: int) -> bool:
    """Whether the group existed to be signalled."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
