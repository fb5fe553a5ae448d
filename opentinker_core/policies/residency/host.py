"""The host tier: values in memory within a budget of bytes, leased out, the least recently used evicted."""

import itertools
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Generic, cast

from opentinker_core.errors import UsageError
from opentinker_core.policies.residency.entry import Entry, Operation
from opentinker_core.policies.residency.types import Backing, NoRoomError, ResidencyError, T, TierStatistics


class HostTier(Generic[T]):
    """Leases values by key from a bounded amount of host memory.

    - A leased value stays in memory. Many may lease one key at once; who changes a value leases it
      whole, says `mark_dirty` within the lease, and keeps others from the same value meanwhile.
    - A missing value is loaded once, however many ask for it; different keys load at the same time.
    - Bytes are admitted before a load: values that nobody leases are freed, least recently used first,
      dirty ones written back before. Where leases leave no room the request waits until its deadline.
      Requests are not queued: a small one may overtake a large one, so that who holds leases can
      get the next one.
    - A value is written back only while nobody leases it whole, hence never half changed.

    All methods may be called from any thread; loads and write-backs run outside the lock.
    """

    def __init__(self, backing: Backing[T], budget: int, timeout_s: float = 60.0) -> None:
        """`budget` in bytes; `timeout_s`: how long a request waits unless it says otherwise.

        Raises:
            UsageError: the budget is not positive.
        """
        if budget < 1:
            raise UsageError(f"budget: {budget}; accepted: a positive number of bytes")
        self.budget = budget
        self._backing = backing
        self._timeout_s = timeout_s
        self._entries: dict[str, Entry[T]] = {}
        self._changed = threading.Condition(threading.Lock())
        self._clock = itertools.count(1)
        self._counts = TierStatistics()

    @contextmanager
    def lease(self, key: str, *, whole: bool = True, timeout_s: float | None = None) -> Iterator[T]:
        """The value of `key`, kept in memory within the `with` block.

        Args:
            whole: False for who only reads what `shrink` leaves; the rest may be freed meanwhile.

        Raises:
            NoRoomError: other leases occupied the memory until the deadline.
            ResidencyError: the value is larger than the budget, or room cannot be made because a
                write-back fails.
            Exception: what the backing's `load` raised.
        """
        entry = self._acquire(key, whole, self._deadline(timeout_s))
        try:
            yield cast(T, entry.value)
        finally:
            with self._changed:
                self._touch(entry, whole)
                self._unpin(entry, whole)

    def put(self, key: str, value: T, *, dirty: bool = True, timeout_s: float | None = None) -> None:
        """Take in a fresh value, in place of any that the key had; `dirty`: it has yet to be written back.

        Raises: as `lease`; and ResidencyError if the key stays leased until the deadline.
        """
        size = self._backing.bytes_of(value)
        deadline = self._deadline(timeout_s)
        with self._changed:
            entry = self._wait_until_free(key, deadline) or self._entries.setdefault(key, Entry(key))
            with self._working_on(entry):
                self._reserve(entry, size, deadline)
                entry.value, entry.present = value, True
                entry.dirty, entry.shrunk, entry.missing = dirty, False, None
                self._touch(entry, whole=True)

    def mark_dirty(self, key: str) -> None:
        """Say, within a lease of the whole value, that it is being changed.

        Raises:
            UsageError: nobody leases it (then the change could be lost already).
        """
        with self._changed:
            self._leased(key).dirty = True

    def reserve(self, key: str, more: int, *, timeout_s: float | None = None) -> None:
        """Account `more` bytes, which the holder of a lease is about to take, once others have made room.

        They count as the value's until `resized` is called.

        Raises:
            UsageError: nobody leases the whole value.
            NoRoomError, ResidencyError: as in `lease`; nothing is accounted then.
        """
        deadline = self._deadline(timeout_s)
        with self._changed:
            entry = self._leased(key)
            self._reserve(entry, entry.size + more, deadline)

    def resized(self, key: str) -> None:
        """Account what a value takes now that it has grown or shrunk within a lease.

        The memory is taken already, so this neither waits nor fails: others are evicted as far as leases
        and write-backs allow, and where that leaves the tier above its budget, requests wait until it is
        below again, and raise what keeps others from being written back.

        Raises:
            UsageError: nobody leases the whole value.
        """
        with self._changed:
            entry = self._leased(key)
            with self._unlocked():
                size = self._backing.bytes_of(cast(T, entry.value))
            self._account(entry, size)
            self._changed.notify_all()
            with suppress(ResidencyError):  # whoever needs the room is told; this caller has its own
                while self._counts.bytes > self.budget and (victim := self._next_to_free()):
                    self._free(victim, key)

    def flush(self, key: str | None = None, *, timeout_s: float | None = None) -> None:
        """Write `key` (None: everything) back if it is dirty; it stays in memory.

        Raises:
            ResidencyError: somebody leased it whole until the deadline.
            Exception: what the backing's `save` raised. It is dirty still; the others are written.
        """
        if key is None:
            self._flush_all(timeout_s)
            return
        with self._changed:
            entry = self._wait_until_free(key, self._deadline(timeout_s), whole_only=True)
            if entry and entry.dirty:
                self._write_back(entry)

    def evict(self, key: str, *, timeout_s: float | None = None) -> None:
        """Write `key` back if it is dirty, then free its memory; raises as `flush` does."""
        deadline = self._deadline(timeout_s)
        with self._changed:
            while entry := self._wait_until_free(key, deadline):
                if entry.dirty:
                    self._write_back(entry)
                else:
                    self._counts.evictions += 1
                    self._discard(entry)

    def drop(self, key: str, *, timeout_s: float | None = None) -> None:
        """Forget the value in memory, with every change since it was last written.

        Raises:
            ResidencyError: somebody leased it until the deadline.
        """
        with self._changed:
            if entry := self._wait_until_free(key, self._deadline(timeout_s)):
                self._discard(entry)

    def forget(self, key: str, *, timeout_s: float | None = None) -> None:
        """Drop the value in memory and remove what was written of it: the key has none any more.

        Raises:
            ResidencyError: somebody leased it until the deadline, or it cannot be removed.
        """
        self.drop(key, timeout_s=timeout_s)
        self._backing.forget(key)

    def resident(self) -> list[str]:
        """What is in memory, whole or shrunk, the least recently used first."""
        with self._changed:
            present = [entry for entry in self._entries.values() if entry.present]
            return [entry.key for entry in sorted(present, key=lambda entry: entry.used)]

    def statistics(self) -> TierStatistics:
        """A copy of the statistics, as of now."""
        with self._changed:
            present = sum(entry.present for entry in self._entries.values())
            return replace(self._counts, entries=present, pinned_bytes=self._pinned_bytes())

    # Below, the caller holds the lock; only `_unlocked` gives it up.

    def _acquire(self, key: str, whole: bool, deadline: float) -> Entry[T]:
        """Pin the entry of `key`, then wait for its value or load it."""
        with self._changed:
            entry = self._entries.setdefault(key, Entry(key))
            # Pinned before it waits: what it waits for is not evicted under its eyes.
            entry.pins += 1
            entry.whole_pins += whole
            hit = True
            try:
                while not entry.serves(whole):
                    if entry.operation is None:
                        hit = False
                        self._fill(entry, deadline)
                    else:
                        self._wait_for(entry.operation, entry, whole, deadline)
            except BaseException:
                self._unpin(entry, whole)
                raise
            self._counts.hits += hit
            self._touch(entry, whole)
            return entry

    def _wait_for(self, operation: Operation, entry: Entry[T], whole: bool, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise ResidencyError(f"{entry.key!r:.100}: somebody else's load or write-back took too long")
        self._wait(deadline)
        try:
            if operation.error is not None and not entry.serves(whole):
                raise operation.error
        finally:
            del operation  # as in `_fill`

    def _fill(self, entry: Entry[T], deadline: float) -> None:
        """Load the value, or restore the part that is missing."""
        with self._working_on(entry) as operation:
            size_before = entry.size
            try:
                if entry.present:
                    self._restore(entry, deadline)
                else:
                    self._load(entry, deadline)
            except BaseException as error:
                self._account(entry, size_before)
                operation.error = error if isinstance(error, Exception) else None
                raise
            finally:
                # An error and a frame that refer to each other would keep values until garbage is collected.
                del operation

    def _load(self, entry: Entry[T], deadline: float) -> None:
        with self._unlocked():
            expected = self._backing.expected_bytes(entry.key)
        self._reserve(entry, expected, deadline)
        with self._unlocked():
            value = self._backing.load(entry.key)
            size = self._backing.bytes_of(value)
        self._reserve(entry, size, deadline)
        entry.value, entry.present = value, True
        self._counts.loads += 1

    def _restore(self, entry: Entry[T], deadline: float) -> None:
        self._reserve(entry, entry.size + (entry.missing or 0), deadline)
        value = cast(T, entry.value)
        with self._unlocked():
            self._backing.restore(entry.key, value)
            size = self._backing.bytes_of(value)
        self._account(entry, size)
        entry.missing = None
        self._counts.restores += 1

    def _reserve(self, entry: Entry[T], size: int, deadline: float) -> None:
        """Account `size` bytes to the entry being worked on, once others have made room for them."""
        if size > self.budget:
            raise ResidencyError(
                f"{entry.key!r:.100}: {size} bytes; accepted: at most the {self.budget} of the host memory"
            )
        while size > entry.size and self._counts.bytes - entry.size + size > self.budget:
            if victim := self._next_to_free():
                self._free(victim, entry.key)
            elif time.monotonic() >= deadline:
                raise self._no_room(entry, size)
            else:
                self._wait(deadline)
        self._account(entry, size)

    def _no_room(self, entry: Entry[T], size: int) -> NoRoomError:
        free = max(0, self.budget - self._counts.bytes)
        return NoRoomError(
            f"{entry.key!r:.100}: no room in host memory: {size - entry.size} bytes are needed, {free} of "
            f"{self.budget} are free, {self._pinned_bytes() - entry.size} are pinned by others"
        )

    def _next_to_free(self) -> Entry[T] | None:
        entry = min(self._entries.values(), key=Entry.turn, default=None)
        return None if entry is None or entry.turn() == math.inf else entry

    def _free(self, victim: Entry[T], key: str) -> None:
        """One step towards freeing what is next: write back, shrink, or evict."""
        if victim.dirty:
            try:
                self._write_back(victim)
            except Exception as error:
                raise ResidencyError(
                    f"{key!r:.100}: no room in host memory, as {victim.key!r:.100} cannot be saved: {error}"
                ) from error
        elif not victim.shrunk:
            self._shrink(victim)
        else:
            self._counts.evictions += 1
            self._discard(victim)

    def _write_back(self, entry: Entry[T]) -> None:
        with self._working_on(entry), self._unlocked():
            self._backing.save(entry.key, cast(T, entry.value))
        entry.dirty = False
        self._counts.write_backs += 1

    def _shrink(self, entry: Entry[T]) -> None:
        value = cast(T, entry.value)
        with self._working_on(entry):
            with self._unlocked():
                in_part = self._backing.shrink(value)
                size = self._backing.bytes_of(value)
            entry.shrunk = True
            entry.missing = entry.size - size if in_part else None
            self._account(entry, size)
        self._counts.shrinks += in_part

    def _discard(self, entry: Entry[T]) -> None:
        self._account(entry, 0)
        del self._entries[entry.key]
        self._changed.notify_all()

    def _flush_all(self, timeout_s: float | None) -> None:
        """Try every dirty entry, then raise the first error."""
        with self._changed:
            dirty = [entry.key for entry in self._entries.values() if entry.dirty]
        errors: list[Exception] = []
        for key in dirty:
            try:
                self.flush(key, timeout_s=timeout_s)
            except Exception as error:  # noqa: BLE001 - raised below, after the others were tried
                errors.append(error)
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # as in `_fill`

    def _leased(self, key: str) -> Entry[T]:
        entry = self._entries.get(key)
        if entry is None or not entry.whole_pins or not entry.serves(whole=True):
            raise UsageError(f"{key!r:.100}: nobody leases the whole value; accepted: within a lease of it")
        return entry

    def _wait_until_free(self, key: str, deadline: float, whole_only: bool = False) -> Entry[T] | None:
        """The entry of `key` once nobody uses it; None if there is none."""
        while (entry := self._entries.get(key)) and not entry.is_free(whole_only):
            if time.monotonic() >= deadline:
                raise ResidencyError(f"{key!r:.100}: in use by {entry.pins} leases until the deadline")
            self._wait(deadline)
        return entry

    def _touch(self, entry: Entry[T], whole: bool) -> None:
        entry.used = next(self._clock)
        if whole:
            entry.used_whole, entry.shrunk = entry.used, False

    def _unpin(self, entry: Entry[T], whole: bool) -> None:
        entry.pins -= 1
        entry.whole_pins -= whole
        self._settle(entry)

    def _settle(self, entry: Entry[T]) -> None:
        """Take an entry without value that nobody waits for out of the table, and wake who waits."""
        if not entry.present and entry.is_free():
            del self._entries[entry.key]
        self._changed.notify_all()

    def _account(self, entry: Entry[T], size: int) -> None:
        self._counts.bytes += size - entry.size
        self._counts.peak_bytes = max(self._counts.peak_bytes, self._counts.bytes)
        entry.size = size

    def _pinned_bytes(self) -> int:
        return sum(entry.size for entry in self._entries.values() if not entry.is_free())

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    def _wait(self, deadline: float) -> None:
        self._changed.wait(max(0.0, deadline - time.monotonic()))

    @contextmanager
    def _working_on(self, entry: Entry[T]) -> Iterator[Operation]:
        """Keep everyone else from the entry."""
        operation = entry.operation = Operation()
        try:
            yield operation
        finally:
            entry.operation = None
            self._settle(entry)

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()
