"""The one divisor of a summed loss, folded into a factor per token before any micro-batching.

Because the factors are known before the batch is split, neither micro-batches, row order, packing nor
the number of rows an episode was split into can change the gradient.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from opentinker_core.config.schema import Normalizer
from opentinker_core.errors import UsageError
from opentinker_core.trajectories.types import Datum


def token_scales(normalizer: Normalizer, datums: Sequence[Datum], max_tokens: int) -> list[np.ndarray]:
    """One float32 (N,) array a datum: the factor of each trained token's loss, 0 where mask is false.

    Over all datums of the global batch, with n_i trained tokens in trajectory i of S:

    - `none`: 1
    - `tokens`: 1 / sum_i n_i
    - `sequences`: 1 / (S * n_i)
    - `constant`: 1 / (S * max_tokens)

    Datums with the same `trajectory_id` are rows of one trajectory; each without an id is its own.

    Raises:
        UsageError: `constant` with `max_tokens` < 1.
    """
    names = trajectory_names(datums)
    tokens_of: Counter[str] = Counter()
    for name, datum in zip(names, datums, strict=True):
        tokens_of[name] += int(datum.mask_N.sum())
    divisors = _divisors(Normalizer(normalizer), tokens_of, max_tokens)
    return [
        np.where(datum.mask_N, np.float32(1 / divisors[name]), np.float32(0))
        for name, datum in zip(names, datums, strict=True)
    ]


def trajectory_names(datums: Sequence[Datum]) -> list[str]:
    """What trajectory each datum is a row of; each without an id is its own."""
    return [datum.trajectory_id or f"\x00{index}" for index, datum in enumerate(datums)]


def _divisors(normalizer: Normalizer, tokens_of: Counter[str], max_tokens: int) -> dict[str, int]:
    match normalizer:
        case Normalizer.NONE:
            return dict.fromkeys(tokens_of, 1)
        case Normalizer.TOKENS:
            return dict.fromkeys(tokens_of, tokens_of.total())
        case Normalizer.SEQUENCES:
            return {name: len(tokens_of) * tokens for name, tokens in tokens_of.items()}
        case Normalizer.CONSTANT:
            if max_tokens < 1:
                raise UsageError(f"max_tokens: {max_tokens} is not accepted; accepted: a positive number")
            return dict.fromkeys(tokens_of, len(tokens_of) * max_tokens)
