"""Nouns of residency: Backing, TierStatistics, ResidencyError, NoRoomError."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from opentinker_core.errors import OpenTinkerError, UsageError

T = TypeVar("T")


class ResidencyError(OpenTinkerError):
    """A value cannot be brought into memory or out of it; the message names the key and the reason."""


class NoRoomError(ResidencyError):
    """Leases kept the memory occupied until the deadline; the same request may succeed later."""


class Backing(ABC, Generic[T]):
    """Where the values of a tier come from and go to. The tier never calls two methods for one key at once.

    An immutable value needs the three abstract methods. A mutable one needs `save` too; one of which a
    part can be left out of memory (the optimizer state of a policy) also `shrink` and `restore`.
    """

    @abstractmethod
    def expected_bytes(self, key: str) -> int:
        """Bytes of memory that the value will take once it is loaded."""

    @abstractmethod
    def load(self, key: str) -> T:
        """Read the value; whatever it raises reaches everyone who waits for the key."""

    @abstractmethod
    def bytes_of(self, value: T) -> int:
        """Bytes of memory that `value` takes now."""

    def save(self, key: str, value: T) -> None:
        """Write the value durably and whole, so that `load` gives it again; if it raises, nothing changed."""
        raise UsageError(f"{key!r:.100}: values of a {type(self).__name__} are immutable")

    def shrink(self, value: T) -> bool:
        """Free the part of a saved value that `restore` can read again; False: there is no such part."""
        return False

    def forget(self, key: str) -> None:
        """Remove what `save` wrote, for good; nothing happens if there is nothing."""
        return

    def restore(self, key: str, value: T) -> None:
        """Read what `shrink` freed back into `value`; if it raises, `value` stays shrunk."""
        return


@dataclass
class TierStatistics:
    """Counts since the tier was made, and what it holds now."""

    hits: int = 0
    """Leases that were served from memory, or by a load that another lease had begun."""
    loads: int = 0
    restores: int = 0
    evictions: int = 0
    shrinks: int = 0
    write_backs: int = 0
    bytes: int = 0
    """Bytes of the values in memory and of those being loaded."""
    peak_bytes: int = 0
    pinned_bytes: int = 0
    """Bytes of what is leased, or is being loaded or written."""
    entries: int = 0
