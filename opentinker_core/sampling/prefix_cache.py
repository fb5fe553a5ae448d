"""Keys and values of prompts that were computed before, by snapshot digest and token prefix.

Kept are whole blocks of prompts, as prefill computes them, never what decoding left: so what a request
finds here has the bits it would compute itself.

Axes: L layers, H key-value heads, T tokens, D features of a head.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from opentinker_core.sampling.kv_cache import BLOCK


class PrefixCache:
    """Blocks of `BLOCK` tokens, the least recently used evicted; used by one thread."""

    def __init__(self, budget: int) -> None:
        """`budget` in bytes; 0: nothing is kept."""
        self.budget = budget
        self.bytes = 0
        self.hits = 0
        """Tokens that were found."""
        self.misses = 0
        """Tokens of prompts that were not."""
        self._blocks: OrderedDict[bytes, Tensor] = OrderedDict()
        """(L, 2, H, T, D) by the digest of adapter and all tokens up to the block's end."""

    def find(self, adapter: str, prompt: Sequence[int]) -> Tensor | None:
        """The longest known beginning of `prompt` (L, 2, H, T, D), short of its last token at least.

        Its last token is always left to compute: its logits are wanted.
        """
        found: list[bytes] = []
        for key in _keys(adapter, prompt[:-1]):
            if key not in self._blocks:
                break
            found.append(key)
        self.hits += BLOCK * len(found)
        self.misses += len(prompt) - BLOCK * len(found)
        self._touch(found)
        return torch.cat([self._blocks[key] for key in found], dim=3) if found else None

    def put(self, adapter: str, prompt: Sequence[int], data_LHWD: Tensor) -> None:
        """Keep the whole blocks of `prompt`, whose keys and values are the first columns of `data_LHWD`."""
        keys = list(_keys(adapter, prompt))
        for index, key in enumerate(keys):
            if key in self._blocks or self.budget == 0:
                continue
            block = data_LHWD[:, :, :, index * BLOCK : (index + 1) * BLOCK].clone()
            self._blocks[key] = block
            self.bytes += block.nbytes
        self._touch([key for key in keys if key in self._blocks])
        while self.bytes > self.budget:
            _, block = self._blocks.popitem(last=False)
            self.bytes -= block.nbytes

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self.bytes = 0

    def _touch(self, chain: Sequence[bytes]) -> None:
        """Mark as used; the beginning last, so that a block never outlives those before it."""
        for key in reversed(chain):
            self._blocks.move_to_end(key)


def _keys(adapter: str, tokens: Sequence[int]) -> Iterator[bytes]:
    digest = hashlib.sha256(adapter.encode())
    ids = np.asarray(tokens, "<i8")
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        digest.update(ids[start : start + BLOCK].tobytes())
        yield digest.digest()
