"""Waiting for what comes by itself, with a limit that slow and busy machines keep to as well."""

import time
from collections.abc import Callable, Iterable

PATIENCE_S = 600.0
"""Far longer than anything here takes: it is reached where something never comes."""


def wait_until(condition: Callable[[], object], what: str = "it", poll_s: float = 0.02) -> None:
    """Return once `condition()` is true.

    Raises:
        AssertionError: it was not within `PATIENCE_S` seconds.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {PATIENCE_S:.0f} s"
        time.sleep(poll_s)


def read_until(stream: Iterable[str], *starts: str) -> None:
    """Read lines of another process until one has begun with each of `starts`.

    Raises:
        AssertionError: the stream ended before; with all that it said.
    """
    wanted, read = set(starts), []
    for line in stream:
        read.append(line)
        wanted -= {start for start in wanted if line.startswith(start)}
        if not wanted:
            return
    raise AssertionError(f"it ended without a word of {sorted(wanted)}, and said:\n{''.join(read)}")
