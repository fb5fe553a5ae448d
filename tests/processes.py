"""Other processes that tests talk to by lines, and kill."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Worker:
    """A process and its pipes."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def line(self) -> str:
        """The next line that it prints; empty: it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def wait(self, seconds: float) -> None:
        """Until it ends by itself.

        Raises:
            subprocess.TimeoutExpired: it does not.
        """
        self._process.wait(seconds)

    def kill(self) -> list[str]:
        """End it with SIGKILL, if it runs still; the lines that it had printed and nobody read."""
        self._process.kill()
        assert self._process.stdout is not None
        left = self._process.stdout.read().splitlines()
        self._process.wait()
        return left


@contextmanager
def worker(module: str, *arguments: object) -> Iterator[Worker]:
    """`python -m module arguments`, killed at the end of the block."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield Worker(process)
        finally:
            process.kill()
