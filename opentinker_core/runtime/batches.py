"""From the episodes of a step to what the trainer is given: credit, datums, scales."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from opentinker_core.advantages.credit import AgentPart, credit
from opentinker_core.advantages.running import RunningMean, to_metrics
from opentinker_core.config.credit import Baseline
from opentinker_core.config.schema import RLPhase
from opentinker_core.evaluation.controls import shuffle_rewards
from opentinker_core.objectives.normalizers import token_scales
from opentinker_core.trajectories.datums import to_datum
from opentinker_core.trajectories.parts import Part, parts_of
from opentinker_core.trajectories.types import Datum, EndReason, Trajectory


@dataclass(frozen=True, eq=False)
class Batch:
    """The datums of one RL step that pull, what their tokens count, and what is in it, in numbers."""

    datums: list[Datum]
    scales: list[np.ndarray]
    summary: dict[str, float]


def rl_batch(
    trajectories: Sequence[Trajectory],
    phase: RLPhase,
    running: Mapping[str, RunningMean],
    shuffle_seed: int,
) -> Batch:
    """The batch of a step's episodes.

    Args:
        running: the running baselines that the step before left.
        shuffle_seed: for the negative control `shuffle_rewards`.
    """
    parts = parts_of(trajectories)
    rewards = [part.rewards for part in parts]
    if phase.shuffle_rewards:
        rewards = _shuffled(parts, shuffle_seed)
    credited = credit(
        [AgentPart(part.group, part.agent, reward) for part, reward in zip(parts, rewards, strict=True)],
        phase.credit,
        phase.advantage,
        running,
    )
    usable = [
        datum
        for part, values in zip(parts, credited.advantages, strict=True)
        if values is not None
        for datum in _datums(part, values, phase)
    ]
    # Normalized over all of them, then cut to those that pull: the others' gradient is zero.
    scales = token_scales(phase.objective.normalizer, usable, phase.sampling.max_tokens)
    penalized = phase.objective.kl_coefficient > 0
    pulling = [i for i, datum in enumerate(usable) if penalized or datum.signal.any()]
    datums = [usable[i] for i in pulling]
    summary = _summary(parts, credited.advantages, datums)
    if phase.credit.baseline is Baseline.RUNNING:
        summary |= to_metrics(credited.running)
    return Batch(datums, [scales[i] for i in pulling], summary)


def _datums(part: Part, values: np.ndarray, phase: RLPhase) -> list[Datum]:
    """One datum a row that has turns to train; together they are one trajectory to the normalizers."""
    sampling, found, at = phase.sampling, [], 0
    for row in part.rows:
        own, at = values[at : at + len(row.turns)], at + len(row.turns)
        masked = frozenset(row.info.get("masked_turns", ()))
        if len(masked) == len(row.turns):
            continue
        datum = to_datum(
            row,
            advantages=own,
            without=masked,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
        )
        found.append(replace(datum, trajectory_id=part.name))
    return found


def _shuffled(parts: Sequence[Part], seed: int) -> list[tuple[float, ...] | None]:
    """The parts' rewards, dealt to others: each whole reward at its new owner's last turn."""
    dealt = shuffle_rewards([part.reward for part in parts], seed)
    return [
        None if reward is None else (*[0.0] * (sum(len(row.turns) for row in part.rows) - 1), reward)
        for part, reward in zip(parts, dealt, strict=True)
    ]


def _summary(
    parts: Sequence[Part], values: Sequence[np.ndarray | None], datums: Sequence[Datum]
) -> dict[str, float]:
    signal = {part.group for part, own in zip(parts, values, strict=True) if own is not None and own.any()}
    truncated = [part for part in parts if part.end_reason in (EndReason.MAX_TURNS, EndReason.CONTEXT)]
    roles = sorted({part.agent for part in parts})
    forks = sum(len(part.rows) - 1 for part in parts)
    return (
        {
            "episodes": float(len(parts)),
            "episodes_missing": float(sum(part.reward is None for part in parts)),
            "episodes_truncated": float(len(truncated)),
            "reward_mean": _mean(parts),
            "groups_with_signal": float(len(signal)),
            "trained_tokens": float(sum(int(datum.mask_N.sum()) for datum in datums)),
        }
        | ({"record_forks": float(forks)} if forks else {})
        | (
            {f"reward/{role}": _mean([part for part in parts if part.agent == role]) for role in roles}
            if len(roles) > 1
            else {}
        )
    )


def _mean(parts: Sequence[Part]) -> float:
    rewards = [part.reward for part in parts if part.reward is not None]
    return float(np.mean(rewards)) if rewards else 0.0
