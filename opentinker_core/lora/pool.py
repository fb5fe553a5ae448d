"""The adapter pool: compute copies of adapters in slots on the base model's device.

A slot belongs to a rank bucket; of each group of linears a bucket holds the factors of all its
slots in one tensor, so that a batch of rows with many adapters is a few batched products. Copies are
in the model's number format, with `Bt` scaled by alpha / rank and rows beyond the adapter's rank zero.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.layout import AdapterLayout, Group, ModelLayout

Key = TypeVar("Key", bound=Hashable)
_RANKS = (8, 16, 32, 64, 128, 256, 512)
_FIRST_SLOTS = 4


@dataclass(frozen=True)
class Slot:
    """A place in the pool."""

    rank: int
    """The bucket's."""
    index: int


@dataclass(frozen=True)
class Wanted:
    """An adapter that a batch needs, and how to know whether the pool's copy is the one."""

    adapter: Adapter
    revision: int = 0
    """Changes whenever the adapter's weights do."""


@dataclass
class _Occupant:
    slot: Slot
    revision: int
    layout: AdapterLayout
    pins: int = 0


class Bucket:
    """The slots of one rank; grows up to the pool's limit."""

    def __init__(self, rank: int, device: torch.device, dtype: torch.dtype) -> None:
        self.rank = rank
        self._device, self._dtype = device, dtype
        self.capacity = _FIRST_SLOTS
        self._A: dict[Group, Tensor] = {}
        self._Bt: dict[str, Tensor] = {}

    def stacked_A(self, group: Group) -> Tensor:
        """The stacked `A` of a group, (slots, members * rank, K)."""
        if group not in self._A:
            self._A[group] = self._zeros(len(group.members) * self.rank, group.inputs)
        return self._A[group]

    def scaled_Bt(self, name: str, outputs: int) -> Tensor:
        """The scaled `Bt` of a layer, (slots, rank, N)."""
        if name not in self._Bt:
            self._Bt[name] = self._zeros(self.rank, outputs)
        return self._Bt[name]

    def targets(self, name: str) -> bool:
        """Whether any adapter of the bucket has had factors for the layer."""
        return name in self._Bt

    def grow(self, capacity: int) -> None:
        """Have room for `capacity` slots; the factors move."""
        self._A = {group: self._grown(old, capacity) for group, old in self._A.items()}
        self._Bt = {name: self._grown(old, capacity) for name, old in self._Bt.items()}
        self.capacity = capacity

    def clear(self, index: int) -> None:
        """Make a slot's factors zero."""
        for tensor in (*self._A.values(), *self._Bt.values()):
            tensor[index].zero_()

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        with torch.inference_mode(False):
            new = old.new_zeros(capacity, *old.shape[1:])
            new[: self.capacity] = old
            return new

    def _zeros(self, *shape: int) -> Tensor:
        with torch.inference_mode(False):  # whoever asks first: the trainer writes to it too
            return torch.zeros(self.capacity, *shape, device=self._device, dtype=self._dtype)


@dataclass
class PoolStats:
    """Counted since the pool was made."""

    loads: int = 0
    evictions: int = 0


class AdapterPool:
    """See the module. Not thread-safe: the engine's one thread uses it."""

    def __init__(
        self, model: ModelLayout, device: torch.device | str, dtype: torch.dtype, max_slots: int = 16
    ) -> None:
        """`max_slots`: of each rank bucket."""
        self.model = model
        self.max_slots = max_slots
        self.stats = PoolStats()
        self.device, self._dtype = torch.device(device), dtype
        self._buckets: dict[int, Bucket] = {}
        self._occupants: OrderedDict[Hashable, _Occupant] = OrderedDict()
        """Least recently used first."""
        self._last_in: dict[Slot, _Occupant] = {}
        """The last occupant of each slot, whether it is there still or not."""

    @property
    def occupied(self) -> int:
        """Adapters in slots, those in use and those kept for the next time."""
        return len(self._occupants)

    @contextmanager
    def lease(self, wanted: Mapping[Key, Wanted]) -> Iterator[dict[Key, Slot]]:
        """Hold the adapters in slots, all at once; those of no lease give way, the longest unused first.

        Raises:
            UsageError: more adapters of one rank bucket than slots.
            OpenTinkerError: an adapter's weights are not finite. Zero times such a weight is not zero, so
                in the pool it could reach another adapter's rows.
        """
        held: list[_Occupant] = []
        try:
            for key, want in wanted.items():
                held.append(self._occupy(key, want))
                held[-1].pins += 1
            yield {key: occupant.slot for key, occupant in zip(wanted, held, strict=True)}
        finally:
            for occupant in held:
                occupant.pins -= 1

    def bucket(self, rank: int) -> Bucket:
        """The bucket of a slot's rank."""
        return self._buckets[rank]

    def layout_of(self, slot: Slot) -> AdapterLayout:
        """The layout of the adapter in a leased slot."""
        return self._last_in[slot].layout

    def forget(self, key: Hashable) -> None:
        """Give up the slot of an adapter that is not wanted again."""
        occupant = self._occupants.get(key)
        if occupant is not None and occupant.pins == 0:
            del self._occupants[key]

    def bucket_rank(self, rank: int) -> int:
        """The rank of the bucket for adapters of `rank`."""
        smallest = 16 if self.device.type == "cuda" else 8  # tensor cores take 16 columns
        return next(size for size in _RANKS if size >= max(rank, smallest))

    def _occupy(self, key: Hashable, want: Wanted) -> _Occupant:
        layout = want.adapter.layout
        occupant = self._occupants.get(key)
        if occupant is None or occupant.slot.rank != self.bucket_rank(layout.rank):
            self.forget(key)
            occupant = _Occupant(self._free_slot(self.bucket_rank(layout.rank)), -1, layout)
            self._occupants[key] = self._last_in[occupant.slot] = occupant
        self._occupants.move_to_end(key)
        if occupant.revision != want.revision or occupant.layout is not layout:
            if occupant.layout is not layout:  # the new factors may be of fewer layers, or of a lower rank
                self._buckets[occupant.slot.rank].clear(occupant.slot.index)
            try:
                self._load(want.adapter, occupant.slot)
            except OpenTinkerError:
                del self._occupants[key]
                raise
            occupant.revision, occupant.layout = want.revision, layout
        return occupant

    def _free_slot(self, rank: int) -> Slot:
        bucket = self._buckets.setdefault(rank, Bucket(rank, self.device, self._dtype))
        taken = {o.slot.index for o in self._occupants.values() if o.slot.rank == rank}
        if len(taken) == bucket.capacity < self.max_slots:
            bucket.grow(min(2 * bucket.capacity, self.max_slots))
        limit = min(bucket.capacity, self.max_slots)
        free = next((index for index in range(limit) if index not in taken), None)
        if free is None:
            idle = [k for k, o in self._occupants.items() if o.slot.rank == rank and o.pins == 0]
            if not idle:
                raise UsageError(
                    f"adapters: more than {self.max_slots} of rank {rank} or the next lower bucket in one "
                    f"batch; accepted: at most {self.max_slots} (runtime.adapter_slots)"
                )
            free = self._occupants.pop(idle[0]).slot.index
            self.stats.evictions += 1
        bucket.clear(free)
        return Slot(rank, free)

    @torch.no_grad()
    def _load(self, adapter: Adapter, slot: Slot) -> None:
        if not bool(adapter.row_P.isfinite().all()):
            raise OpenTinkerError(
                "adapter: its weights are not finite; accepted: a state that did not diverge"
            )
        bucket, rank = self._buckets[slot.rank], slot.rank
        self.stats.loads += 1
        for group in self.model.groups:
            for m, (name, outputs) in enumerate(group.members):
                factors = adapter.factors.get(name)
                if factors is None:
                    continue
                own = len(factors.A_RK)
                bucket.stacked_A(group)[slot.index, m * rank : m * rank + own] = factors.A_RK
                bucket.scaled_Bt(name, outputs)[slot.index, :own] = factors.Bt_RN * factors.scaling
