"""Operations that run over many turns of the engine, beside others: what decodes token by token."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from opentinker_core.runtime.operation_queue import Entry
from opentinker_core.runtime.operations import Operation, Progress


@dataclass
class _Stream:
    entry: Entry
    start: float
    """Its tenant's virtual time when it began."""
    done: int = 0
    """Tokens so far."""


class Streams:
    """Those that run, with how far they have got. Not thread-safe: its owner holds a lock.

    A stream's place in the fair order is the virtual time at which it began and what it was served since:
    so another tenant's batches come between its steps as its share has it.
    """

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def operations(self) -> list[Operation[Any]]:
        """What runs."""
        return [stream.entry.operation for stream in self._streams.values()]

    @property
    def entries(self) -> list[Entry]:
        """What runs, as it was submitted."""
        return [stream.entry for stream in self._streams.values()]

    @property
    def tokens(self) -> int:
        """That were put through the base model for all that run."""
        return sum(stream.done for stream in self._streams.values())

    def turn(self) -> tuple[float, int]:
        """(virtual time, number) of the stream that is furthest behind."""
        return min((stream.start + stream.done, number) for number, stream in self._streams.items())

    def begin(self, entry: Entry, start: float) -> None:
        """Note that `entry` runs."""
        self._streams[entry.number] = _Stream(entry, start)

    def end(self, entry: Entry) -> None:
        """Note that `entry` ended."""
        self._streams.pop(entry.number, None)

    def note(self, progress: Iterable[Progress]) -> list[tuple[Entry, Progress]]:
        """Note how far each has got; gives the entries too."""
        by_operation = {id(stream.entry.operation): stream for stream in self._streams.values()}
        known = [(by_operation[id(one.operation)], one) for one in progress]
        for stream, one in known:
            stream.done = one.tokens
        return [(stream.entry, one) for stream, one in known]
