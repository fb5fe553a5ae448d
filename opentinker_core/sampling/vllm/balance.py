"""Which endpoint gets a request: one with the prompt's beginning in its cache, unless it is overloaded."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 16
"""Tokens of a block of vLLM's prefix cache."""
_REMEMBERED = 65536
"""Prefixes that are remembered; the oldest are forgotten first."""
_SLACK = 8
"""Completions that an endpoint may be ahead of the least busy one, beside a quarter of its own load."""


class Balancer:
    """Counts what runs on each of `count` endpoints and remembers which prefixes they have seen."""

    def __init__(self, count: int) -> None:
        self._running = [0] * count
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, version: str, prompt: Sequence[int], usable: Sequence[int]) -> int:
        """Choose one of the `usable` endpoints for a completion of a prompt; `end` it later.

        The endpoint that saw the longest beginning of the prompt, at least half of it, is preferred: turns of
        an episode and members of a group stay where their cache is.
        """
        with self._lock:
            least = min(usable, key=lambda index: self._running[index])
            prefixes = _prefixes(version, prompt)
            chosen = self._known(prefixes, usable, least)
            self._running[chosen] += 1
            for prefix in prefixes:
                self._seen[prefix] = chosen
                self._seen.move_to_end(prefix)
            while len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
            return chosen

    def end(self, index: int) -> None:
        """Say that a completion of an endpoint ended."""
        with self._lock:
            self._running[index] -= 1

    def running(self) -> list[int]:
        """Completions that run, by endpoint."""
        with self._lock:
            return list(self._running)

    def _known(self, prefixes: list[int], usable: Sequence[int], least: int) -> int:
        for prefix in reversed(prefixes[len(prefixes) // 2 :]):
            index = self._seen.get(prefix)
            if index is not None and index in usable:
                load, lowest = self._running[index], self._running[least]
                return index if load <= 1.25 * lowest + _SLACK else least
        return least


def _prefixes(version: str, prompt: Sequence[int]) -> list[int]:
    """Hashes of the prompt's first 1, 2, ... blocks under a version."""
    hashes, value = [], hash(version)
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        value = hash((value, *prompt[end - BLOCK : end]))
        hashes.append(value)
    return hashes
