"""Negative controls: a training signal from which nothing can be learned."""

from collections.abc import Sequence

import numpy as np


def shuffle_rewards(rewards: Sequence[float | None], seed: int) -> list[float | None]:
    """Permute the rewards of a step over all its episodes, across groups.

    Each episode gets the reward of a random one, so that mean and spread stay and the meaning is
    gone. Missing rewards (None) stay where they are: an episode that failed has failed.
    """
    present = [reward for reward in rewards if reward is not None]
    order = iter(np.random.default_rng(seed).permutation(len(present)))
    return [None if reward is None else present[next(order)] for reward in rewards]
