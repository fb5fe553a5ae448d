"""Keys and values of running sequences, in shelves of fixed widths, within a budget of bytes.

A sequence lies in a row of the shelf whose width fits it, and moves to a wider shelf when it outgrows
that. So little of a shelf is padding, attention over a shelf is one call whatever the lengths of its
sequences, and its shape follows from a sequence's own length alone: a sequence gets the same bits
whoever decodes beside it.

Axes: L layers, S rows of a shelf, H key-value heads, W columns, D features of a head.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 16
"""Widths, chunks of prompts and what the prefix cache keeps are multiples of this many tokens."""
_NARROWEST = 64
_FEWEST = 4
"""Rows that a shelf begins with."""


@dataclass(frozen=True)
class CacheShape:
    """What one token takes."""

    layers: int
    heads: int
    features: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype, device: torch.device) -> "CacheShape":
        """The shape for a model with this Hugging Face config."""
        heads = config.num_attention_heads
        features = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(config.num_hidden_layers, kv_heads, features, dtype, device)

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.heads * self.features * self.dtype.itemsize

    def zeros(self, rows: int, width: int) -> Tensor:
        """(L, 2, S, H, W, D). Zeros, because what is masked still must be finite."""
        shape = (self.layers, 2, rows, self.heads, width, self.features)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def width_for(tokens: int) -> int:
    """The narrowest width that holds `tokens`: powers of two, and half way between them, from 64 on."""
    width = _NARROWEST
    while width < tokens:
        width = width * 3 // 2 if width & (width - 1) == 0 else width * 4 // 3
    return width


class Shelf:
    """Rows of one width; those in use come first."""

    def __init__(self, shape: CacheShape, width: int) -> None:
        self.width = width
        self._shape = shape
        self.data_LSHWD = shape.zeros(0, width)
        """(L, 2, S, H, W, D): keys, then values."""
        self.places: list[Place] = []

    @property
    def capacity(self) -> int:
        return self.data_LSHWD.shape[2]

    def resize(self, capacity: int) -> None:
        """Have room for `capacity` rows, of which those in use are kept."""
        data = self._shape.zeros(capacity, self.width)
        data[:, :, : len(self.places)] = self.data_LSHWD[:, :, : len(self.places)]
        self.data_LSHWD = data


@dataclass(eq=False)
class Place:
    """Where a sequence lies; its row changes when others leave."""

    shelf: Shelf
    row: int

    @property
    def data_LHWD(self) -> Tensor:
        """(L, 2, H, W, D)"""
        return self.shelf.data_LSHWD[:, :, self.row]


class KVCache:
    """See the module. Used by one thread, in inference mode."""

    def __init__(self, shape: CacheShape, budget: int) -> None:
        """`budget` in bytes."""
        self.shape = shape
        self.budget = budget
        self._shelves: dict[int, Shelf] = {}

    @property
    def bytes(self) -> int:
        """What is allocated."""
        return sum(self._bytes(shelf.width) * shelf.capacity for shelf in self._shelves.values())

    @property
    def sequences(self) -> int:
        """How many have a place."""
        return sum(len(shelf.places) for shelf in self._shelves.values())

    @property
    def shelves(self) -> list[Shelf]:
        """Those in use."""
        return list(self._shelves.values())

    def place(self, tokens: int) -> Place | None:
        """A row for a sequence of `tokens`, or None where the budget has no room now."""
        width = width_for(tokens)
        shelf = self._shelves.get(width) or Shelf(self.shape, width)
        if len(shelf.places) == shelf.capacity and not self._grow(shelf):
            return None
        self._shelves[width] = shelf
        shelf.places.append(Place(shelf, len(shelf.places)))
        return shelf.places[-1]

    def fits(self, tokens: int) -> bool:
        """Whether the budget could hold a sequence that grows to `tokens`, if there were no others."""
        return 2 * self._bytes(width_for(tokens)) <= self.budget  # it moves from shelf to shelf

    def widened(self, place: Place, tokens: int) -> Place | None:
        """A place with room for `tokens`: the same, or a wider one with the same content; None: no room."""
        if tokens <= place.shelf.width:
            return place
        wider = self.place(tokens)
        if wider is not None:
            copy(place, wider, place.shelf.width)
            self.release(place)
        return wider

    def release(self, place: Place, *, scrub: bool = False) -> None:
        """Give up a row; the last one of its shelf moves there. `scrub`: it may hold what is not finite."""
        shelf = place.shelf
        last = shelf.places.pop()
        if last is not place:
            place.data_LHWD.copy_(last.data_LHWD)
            shelf.places[place.row] = last
            last.row = place.row
        elif scrub:
            place.data_LHWD.zero_()
        if not shelf.places and shelf.capacity > _FEWEST:
            shelf.resize(_FEWEST)  # a few stay, for the next to come

    def _grow(self, shelf: Shelf) -> bool:
        """Double the rows of `shelf`, or add as many as the budget allows; False: not even one."""
        size = self._bytes(shelf.width)
        wanted = max(_FEWEST, shelf.capacity)
        room = (self.budget - self.bytes) // size
        if room < 1:
            for other in self._shelves.values():
                if other is not shelf and len(other.places) < other.capacity:
                    other.resize(len(other.places))
            room = (self.budget - self.bytes) // size
        if room < 1:
            return False
        shelf.resize(shelf.capacity + min(wanted, room))
        return True

    def _bytes(self, width: int) -> int:
        return width * self.shape.bytes_per_token


def copy(source: Place, target: Place, tokens: int) -> None:
    """Copy the first `tokens` columns of a place."""
    target.data_LHWD[:, :, :, :tokens] = source.data_LHWD[:, :, :, :tokens]
