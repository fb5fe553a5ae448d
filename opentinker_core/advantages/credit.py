"""Credit: from the rewards of turns, of one agent or several, to advantages of turns.

Returns say what a turn is held responsible for, baselines what that is compared with. A baseline is
always of one role: in a game of two the rewards of both sides sum to zero, and a mean over both would be
zero whatever they do. See docs/credit.md. What a learned value function adds (generalized advantage
estimation over turns) would be one more kind of baseline here.

Axes: G members of one group, K turns of one agent.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from opentinker_core.advantages import check_estimator, group_advantages
from opentinker_core.advantages.means import group_mean
from opentinker_core.advantages.running import RunningMean
from opentinker_core.config.credit import Advantage, Baseline, CreditConfig, Returns
from opentinker_core.errors import UsageError

NOTHING_YET: Mapping[str, RunningMean] = MappingProxyType({})
"""The running baselines before the first step."""


@dataclass(frozen=True)
class AgentPart:
    """What one agent did in one episode, as far as credit is concerned."""

    task: int
    """Parts of equal task are of episodes that began alike."""
    role: str
    rewards: tuple[float, ...] | None
    """One a turn of this agent; None: missing (and not zero)."""


@dataclass(frozen=True, eq=False)
class Credit:
    """Advantages, and what the next step needs to know of this one."""

    advantages: list[np.ndarray | None]
    """For each part float64 (K,), one a turn; None where the rewards are missing."""
    running: dict[str, RunningMean]
    """Role → baseline to carry on; with other baselines than `running`, as given."""


_Turns = list[list[float]]
_Returns = dict[int, list[float]]
"""Place of a part → returns of its turns, of those that have rewards and turns."""


def credit(
    parts: Sequence[AgentPart],
    config: CreditConfig,
    estimator: Advantage,
    running: Mapping[str, RunningMean] = NOTHING_YET,
) -> Credit:
    """The advantages of the turns of one step's episodes.

    Missing parts get none and change none of the others'; neither do parts of other roles. A group of
    one has advantage 0. The order of the parts changes no bit.

    Args:
        estimator: how the baselines `group` and `turn` compare; the others do not use it.
        running: what the step before returned; used with the baseline `running` only. A role that
            has no past is compared with this step's own mean.

    Raises:
        UsageError: a reward that is not finite, or an unknown estimator.
    """
    check_estimator(estimator)
    returns = {
        place: _returns(f"parts[{place}].rewards", part.rewards, config)
        for place, part in enumerate(parts)
        if part.rewards is not None
    }
    acting = {place: turns for place, turns in returns.items() if turns}
    carried = dict(running)
    found: _Returns = dict(returns)
    for places in _grouped(acting, parts, config.baseline):
        turns_G = [acting[place] for place in places]
        if config.baseline is Baseline.RUNNING:
            role = parts[places[0]].role
            compared, carried[role] = _against_past(turns_G, running.get(role), config.momentum)
        else:
            compared = _COMPARED[config.baseline](estimator, turns_G)
        found.update(zip(places, compared, strict=True))
    arrays = [np.array(found[place], np.float64) if place in found else None for place in range(len(parts))]
    return Credit(arrays, carried)


def _returns(field: str, rewards: Sequence[float], config: CreditConfig) -> list[float]:
    """One return a turn."""
    for turn, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise UsageError(f"{field}[{turn}]: {reward} is not accepted; accepted: finite numbers")
    if config.returns is Returns.EPISODE:
        return [math.fsum(rewards)] * len(rewards)
    returns, following = [], 0.0
    for reward in reversed(rewards):  # Sutton and Barto, 2nd edition, (3.9): G_k = r_k + discount * G_k+1
        following = reward + config.discount * following
        returns.append(following)
    return returns[::-1]


def _grouped(acting: _Returns, parts: Sequence[AgentPart], baseline: Baseline) -> list[list[int]]:
    """Places of the parts that are compared with each other: those of one role, and of one task."""
    groups: dict[Hashable, list[int]] = {}
    for place in acting:
        part = parts[place]
        key = part.role if baseline is Baseline.RUNNING else (part.task, part.role)
        groups.setdefault(key, []).append(place)
    return list(groups.values())


def _against_turns(estimator: Advantage, turns_G: _Turns) -> _Turns:
    """Each turn against the same one of the members that came so far."""
    result = [[0.0] * len(turns) for turns in turns_G]
    for k in range(max(map(len, turns_G))):
        members = [member for member, turns in enumerate(turns_G) if len(turns) > k]
        found = group_advantages(estimator, [[turns_G[member][k]] for member in members])
        for member, (advantage,) in zip(members, found, strict=True):
            result[member][k] = advantage
    return result


def _against_past(turns_G: _Turns, past: RunningMean | None, momentum: float) -> tuple[_Turns, RunningMean]:
    """Each turn against what this role's episodes brought before; and with this step's, for the next."""
    now = group_mean(turns_G)
    baseline = now if past is None else past.mean
    compared = [[value - baseline for value in turns] for turns in turns_G]
    return compared, (past or RunningMean(0.0, 0)).after(now, momentum)


_COMPARED: dict[Baseline, Callable[[Advantage, _Turns], _Turns]] = {
    Baseline.GROUP: group_advantages,
    Baseline.TURN: _against_turns,
    Baseline.NONE: lambda _, turns_G: turns_G,
}
