"""What the host tier knows of a key. Nouns: Entry, Operation."""

import math
from dataclasses import dataclass
from typing import Generic

from opentinker_core.policies.residency.types import T


@dataclass(eq=False)
class Operation:
    """One piece of work on an entry that nobody else may touch meanwhile."""

    error: Exception | None = None
    """Why a load or a restore failed: those who waited for it fail too."""


@dataclass(eq=False)
class Entry(Generic[T]):
    """A value in memory, or one on its way there. Entries that are pinned or worked on stay in the table."""

    key: str
    value: T | None = None
    present: bool = False
    size: int = 0
    """Bytes accounted to it: taken, or reserved for a load."""
    dirty: bool = False
    shrunk: bool = False
    """Shrinking was tried since it was last leased whole; implies that it is clean."""
    missing: int | None = None
    """Bytes that a restore will need; None: the value is whole."""
    pins: int = 0
    """Leases, and requests that wait for one."""
    whole_pins: int = 0
    used: int = 0
    """When it was last leased, on the tier's clock."""
    used_whole: int = 0
    operation: Operation | None = None

    def serves(self, whole: bool) -> bool:
        """Whether it can be leased as it is."""
        return self.present and self.operation is None and (self.missing is None or not whole)

    def is_free(self, whole_only: bool = False) -> bool:
        """Whether nobody uses it (or, with `whole_only`, nobody may be changing it)."""
        return self.operation is None and not (self.whole_pins if whole_only else self.pins)

    def turn(self) -> float:
        """Its place in the order in which memory is freed, lowest first; infinite: it has to stay.

        What `shrink` frees ages from the last lease of the whole value, the rest from the last lease of
        any kind: least recently used, part by part.
        """
        if not self.present or self.operation is not None:
            return math.inf
        if not self.shrunk and not self.whole_pins:
            return self.used_whole
        return math.inf if self.pins else self.used
