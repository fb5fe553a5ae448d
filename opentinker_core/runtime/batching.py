"""Which operations run next, together: fair between tenants, as full as what waits allows.

Fairness is start-time fair queueing (Goyal, Vin, Cheng, "Start-time Fair Queuing", 1996) over tokens:
each tenant has a virtual time, the tokens it was served; the tenant with the least of it goes first,
and one that comes back from idling starts no earlier than those that are being served. Within a
tenant the oldest operation goes first. The first operation of a batch is chosen so; others of its
kind, of any tenant and policy, join as company while there is room.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from opentinker_core.errors import UsageError
from opentinker_core.runtime.operation_queue import Entry
from opentinker_core.runtime.operations import FUSED, Kind, Lane, Operation
from opentinker_core.sampling.protocol import BASE

OPERATION_COST = 256
"""Tokens that every operation costs its tenant besides its own: a pass is not free, however short."""


@dataclass(frozen=True)
class BatchLimits:
    """How large a fused batch gets. An operation that is larger by itself runs alone."""

    slots: int
    """Different adapters; the base model needs none."""
    tokens: int = 16384
    """Tokens of a batch of `forward_backward` or `forward`."""
    sequences: int = 256
    """Completions of a batch of `sample`."""

    def __post_init__(self) -> None:
        for name in ("slots", "tokens", "sequences"):
            if (value := getattr(self, name)) < 1:
                raise UsageError(f"{name}: {value} is not accepted; accepted: at least 1")


@dataclass(frozen=True)
class Batch:
    """Operations to run together; those of one lane stand in their order."""

    entries: tuple[Entry, ...]
    has_room: bool
    """Whether more operations could join, if there were any."""


class FairShares:
    """The virtual times of the tenants, in tokens."""

    def __init__(self, company_lead: int) -> None:
        """`company_lead`: how far company may put a tenant ahead of the one that is served, at most.

        Riding along in a pass that another tenant pays for uses what would be idle otherwise, so
        a tenant does not have to make up for more than this later.
        """
        self._company_lead = company_lead
        self._now = 0.0
        self._times: dict[str, float] = {}

    def time_of(self, tenant: str) -> float:
        """The virtual time of a tenant that has operations waiting."""
        return self._times[tenant]

    def joined(self, tenant: str) -> None:
        """Say that `tenant` has something waiting: having idled earns it no credit."""
        self._times[tenant] = max(self._times.get(tenant, 0.0), self._now)

    def served(self, first: str, operations: Sequence[Operation[Any]]) -> None:
        """Charge for a batch, which was formed around an operation of tenant `first`."""
        self._now = self._times[first]
        limit = self._now + self._company_lead
        for operation in operations:
            time = self._times[operation.tenant]
            charged = time + cost(operation)
            if operation.tenant != first:
                charged = max(time, min(charged, limit))
            self._times[operation.tenant] = charged

    def reached(self, time: float) -> None:
        """Say that somebody is served who was served up to `time`: newcomers start no earlier."""
        self._now = max(self._now, time)

    def idle(self) -> None:
        """Say that nothing waits: nobody is ahead of anybody any more."""
        self._now = 0.0
        self._times.clear()


def cost(operation: Operation[Any]) -> int:
    """What an operation costs its tenant, in tokens."""
    return operation.tokens + OPERATION_COST


def join_streams(
    lanes: Mapping[Lane, Sequence[Entry]],
    shares: FairShares,
    limits: BatchLimits,
    running: Sequence[Operation[Any]],
) -> Batch | None:
    """Those heads of `lanes` that have room beside the streams that run; None: there are none."""
    kinds = {operation.kind for operation in running}
    for kind in kinds:
        batch = _fill(lanes, kind, shares, limits, running)
        if batch.entries:
            return batch
    return None


def form_batch(lanes: Mapping[Lane, Sequence[Entry]], shares: FairShares, limits: BatchLimits) -> Batch:
    """The batch to run next, of the heads of `lanes`, which are not empty. Removes nothing."""
    first = min(
        (lane[0] for lane in lanes.values()),
        key=lambda entry: (shares.time_of(entry.operation.tenant), entry.number),
    )
    kind = first.operation.kind
    if kind not in FUSED:
        return Batch((first,), has_room=False)
    return _fill(lanes, kind, shares, limits)


def _fill(
    lanes: Mapping[Lane, Sequence[Entry]],
    kind: Kind,
    shares: FairShares,
    limits: BatchLimits,
    running: Sequence[Operation[Any]] = (),
) -> Batch:
    """Fill a batch, always from the tenant that had least, of it the oldest operation."""
    lines = {lane: iter(entries) for lane, entries in lanes.items() if entries[0].operation.kind is kind}
    heads: dict[str, list[tuple[int, Entry]]] = {}
    for (tenant, _), line in lines.items():
        head = next(line)
        heappush(heads.setdefault(tenant, []), (head.number, head))
    tenants = [(shares.time_of(tenant), waiting[0][0], tenant) for tenant, waiting in heads.items()]
    heapify(tenants)
    filling = _Filling(kind, limits, is_empty=not running)
    for operation in running:
        filling.count(operation)
    while tenants and not filling.is_full:
        time, _, tenant = heappop(tenants)
        _, entry = heappop(heads[tenant])
        if filling.admits(entry):
            time += cost(entry.operation)
            behind = next(lines[entry.operation.lane], None)
            # Behind a step nothing joins: whether it can be run depends on how the step ends.
            if behind and behind.operation.kind is kind and kind is not Kind.OPTIM_STEP:
                heappush(heads[tenant], (behind.number, behind))
        if heads[tenant]:
            heappush(tenants, (time, heads[tenant][0][0], tenant))
    return Batch(tuple(filling.entries), has_room=not filling.refused_any and not filling.is_full)


@dataclass
class _Filling:
    """A batch while it is filled."""

    kind: Kind
    limits: BatchLimits
    is_empty: bool
    """Whether the next is the first."""
    entries: list[Entry] = field(default_factory=list)
    refused_any: bool = False
    _adapters: set[str] = field(default_factory=set)
    _size: int = 0

    @property
    def is_full(self) -> bool:
        return self._size >= self._capacity

    @property
    def _capacity(self) -> int:
        return self.limits.sequences if self.kind is Kind.SAMPLE else self.limits.tokens

    def admits(self, entry: Entry) -> bool:
        """Take `entry` in if there is room for it, as there always is for the first."""
        operation = entry.operation
        needs_slot = operation.subject != BASE and operation.subject not in self._adapters
        no_slot = needs_slot and len(self._adapters) == self.limits.slots
        if not self.is_empty and (no_slot or self._size + self._size_of(operation) > self._capacity):
            self.refused_any = True
            return False
        self.entries.append(entry)
        self.count(operation)
        return True

    def count(self, operation: Operation[Any]) -> None:
        """Account what is in the batch."""
        self.is_empty = False
        self._size += self._size_of(operation)
        if operation.subject != BASE:
            self._adapters.add(operation.subject)

    def _size_of(self, operation: Operation[Any]) -> int:
        return operation.sequences if self.kind is Kind.SAMPLE else operation.tokens
