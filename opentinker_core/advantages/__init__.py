"""Advantage estimators: one file each, a function of the returns of the turns of one group's members.

Axes: E episodes of a step, G members of one group with known rewards. A member has one return a turn,
and in all means counts once.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from opentinker_core.advantages.dr_grpo import dr_grpo
from opentinker_core.advantages.grpo import grpo
from opentinker_core.advantages.rloo import rloo
from opentinker_core.config.credit import Advantage
from opentinker_core.errors import UsageError

_ESTIMATORS: dict[Advantage, Callable[[Sequence[Sequence[float]]], list[list[float]]]] = {
    Advantage.GRPO: grpo,
    Advantage.DR_GRPO: dr_grpo,
    Advantage.RLOO: rloo,
}


def advantages(name: Advantage, rewards: Sequence[float | None], groups: Sequence[int]) -> np.ndarray:
    """One float64 advantage an episode, shape (E,), from its reward and the group it belongs to.

    A missing reward (None) is no reward of zero: it enters neither mean, nor deviation, nor count, and
    its advantage is 0 (the episode is not trained). A group of one, and a group whose rewards are
    all equal, have advantage 0. The order of the episodes does not change a single bit.

    Raises:
        UsageError: an unknown estimator, lengths that differ, or a reward that is not finite.
    """
    check_estimator(name)
    if len(rewards) != len(groups):
        raise UsageError(f"groups: {len(groups)} given for {len(rewards)} rewards; accepted: one each")
    members: dict[int, dict[int, float]] = {}
    for episode, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if reward is not None:
            if not math.isfinite(reward):
                raise UsageError(f"rewards[{episode}]: {reward} is not accepted; accepted: finite, or None")
            members.setdefault(group, {})[episode] = float(reward)
    result_E = np.zeros(len(rewards), dtype=np.float64)
    for rewards_of in members.values():
        turns_G = group_advantages(name, [[reward] for reward in rewards_of.values()])
        result_E[list(rewards_of)] = [advantage for (advantage,) in turns_G]
    return result_E


def group_advantages(name: Advantage, returns_G: Sequence[Sequence[float]]) -> list[list[float]]:
    """One advantage a turn for each member of one group; a member has one turn at least.

    A group of one, and a group whose returns are all equal, have advantage 0.

    Raises:
        UsageError: an unknown estimator.
    """
    check_estimator(name)
    if len(returns_G) == 1 or len({value for turns in returns_G for value in turns}) == 1:
        return [[0.0] * len(turns) for turns in returns_G]
    return _ESTIMATORS[Advantage(name)](returns_G)


def check_estimator(name: Advantage) -> None:
    """Raise `UsageError` unless there is an estimator of this name."""
    if name not in _ESTIMATORS:
        raise UsageError(f"advantage: {name!r} is unknown; accepted: {', '.join(_ESTIMATORS)}")
