"""How long-running work says how far it is."""

from typing import Protocol


class Report(Protocol):
    """Receives progress: `done` of `total` units of `stage`; a total of 0 means unknown."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""
