"""`Part`: what one agent did in one episode, as the trajectories that record it.

There is one trajectory a part, and several where the record forked: then each is a row of it, and the
part's rewards are those of all its rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from opentinker_core.trajectories.types import EndReason, Trajectory


@dataclass(frozen=True)
class Part:
    """One agent's part of one episode."""

    rows: tuple[Trajectory, ...]

    @property
    def group(self) -> int:
        """Of the episode: those that began alike."""
        return self.rows[0].group

    @property
    def agent(self) -> str:
        """Whose part it is."""
        return self.rows[0].agent

    @property
    def end_reason(self) -> EndReason:
        """Of the episode."""
        return self.rows[0].end_reason

    @property
    def name(self) -> str:
        """What datums of all rows have in common."""
        return self.rows[0].trajectory_id

    @property
    def rewards(self) -> tuple[float, ...] | None:
        """One a turn, over all rows; None: missing (the episode failed)."""
        turns = [turn.reward for row in self.rows for turn in row.turns]
        known = tuple(reward for reward in turns if reward is not None)
        return None if self.end_reason is EndReason.FAILED or len(known) < len(turns) else known

    @property
    def reward(self) -> float | None:
        """Of the whole part; None: missing."""
        rewards = self.rewards
        if rewards == ():  # it has said nothing
            return self.rows[0].reward
        return None if rewards is None else math.fsum(rewards)


def parts_of(trajectories: Sequence[Trajectory]) -> list[Part]:
    """The parts that `trajectories` record, in the order of their first rows."""
    rows: dict[tuple[int, int, str], list[Trajectory]] = {}
    for trajectory in trajectories:
        place = trajectory.group, trajectory.member, trajectory.agent
        rows.setdefault(place, []).append(trajectory)
    return [Part(tuple(found)) for found in rows.values()]
