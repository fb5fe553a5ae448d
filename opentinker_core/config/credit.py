"""Config of credit: from the rewards of turns to the advantages of turns (see docs/credit.md)."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from opentinker_core.config.common import Frozen, Probability


class Advantage(StrEnum):
    """Estimators over a group of episodes that share a prompt."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"


class Returns(StrEnum):
    """What a turn is held responsible for."""

    EPISODE = "episode"
    """All rewards of the agent's episode, for each of its turns."""
    TURN = "turn"
    """The rewards from this turn on, discounted."""


class Baseline(StrEnum):
    """What returns are compared with; always of the same role, and never across roles."""

    GROUP = "group"
    """The episodes of the same task, in which each counts once."""
    TURN = "turn"
    """The same turn of the episodes of the same task, of those that came so far."""
    RUNNING = "running"
    """A moving average over the steps before: for self-play, where no group is of one task's equals."""
    NONE = "none"
    """Zero."""


class CreditConfig(Frozen):
    """How the rewards of an agent's turns become advantages.

    With the baselines `group` and `turn` the phase's `advantage` says which estimator compares; the
    others subtract the baseline and do nothing else.
    """

    returns: Returns = Returns.EPISODE
    discount: Probability = 1.0
    """Of a reward for each turn of the same agent that lies between, with `returns: turn`."""
    baseline: Baseline = Baseline.GROUP
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Weight of the steps before, with `baseline: running`."""

    @model_validator(mode="after")
    def _discounts_turns(self) -> "CreditConfig":
        if self.returns is Returns.EPISODE and self.discount != 1:
            raise ValueError(
                f"discount: {self.discount:g}; accepted with returns 'episode': 1, as all turns get the same"
            )
        return self
