"""What is agreed before an episode begins, as data: `CoordinationProtocol`, `TurnOrder`, `OnDeath`."""

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from opentinker_core.errors import UsageError

Name = Annotated[str, Field(min_length=1, max_length=200)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class TurnOrder(StrEnum):
    """Who acts when. Each must be what the environment asks for; if not, the episode ends."""

    SEQUENTIAL = "sequential"
    """One at a time, in the order in which the agents are declared, from whom the environment asks first."""
    SIMULTANEOUS = "simultaneous"
    """All that still play, at once: nobody sees another's action of the same round."""
    CONDITIONAL = "conditional"
    """Whom the environment asks, one or several at once; nobody else."""
    MESSAGES = "messages"
    """Whoever may speak, when it is ready."""


class OnDeath(StrEnum):
    """What follows when an agent has used up its attempts (it crashed, was late, or sampled stale)."""

    END = "end"
    """The episode ends; all its rewards are missing."""
    GO_ON = "go_on"
    """The others go on as long as there is a quorum; the reward of the dead is missing."""
    FORFEIT = "forfeit"
    """As `go_on`, but leaving is a move of the dead: what the environment gives it counts. Of several agents
    one whose context is full leaves as well: being truncated would be a way out of a lost game."""


class Phase(StrEnum):
    """What all policies do together in a generation; at the end of each all wait for each other."""

    ROLLOUT = "rollout"
    UPDATE = "update"
    REFRESH = "refresh"


class PhaseDeadlines(BaseModel):
    """Seconds after which a phase that has not ended in all policies fails."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rollout: Seconds = 3600.0
    update: Seconds = 3600.0
    refresh: Seconds = 600.0


class CoordinationProtocol(BaseModel):
    """Who plays with which policy, in which order, for how long, and what happens when someone dies.

    The barriers between phases are no option: an update never begins before all episodes of its
    generation have ended, and none of the next before all policies are refreshed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policies: dict[Name, Name] = Field(min_length=1)
    """Agent → policy, in the order of turns. Several agents may share a policy."""
    frozen: tuple[Name, ...] = ()
    """Policies that play and are never updated."""
    order: TurnOrder
    turn_barrier: bool = True
    """With `messages`: a step waits for all who may speak. In the other orders it always does."""
    turn_s: Seconds = 60.0
    """For one attempt at a turn."""
    episode_s: Seconds = 600.0
    """For the whole episode; the turns' deadlines never lie beyond it."""
    max_rounds: int = Field(default=1000, ge=1)
    """Steps of the environment; then the episode is truncated, and its rewards count."""
    attempts: int = Field(default=2, ge=1, le=100)
    """At a turn, before its agent counts as dead."""
    on_death: OnDeath = OnDeath.END
    quorum: int = Field(default=1, ge=1)
    """Agents that must live for the episode to go on."""
    usable_episodes: float = Field(default=0.5, ge=0, le=1)
    """Share of a generation's episodes that must have rewards for its update to begin."""
    phase_s: PhaseDeadlines = PhaseDeadlines()

    @model_validator(mode="after")
    def _consistent(self) -> "CoordinationProtocol":
        agents = len(self.policies)
        if self.quorum > agents:
            raise ValueError(f"quorum: {self.quorum} is not accepted; accepted: 1 to {agents}, the agents")
        unknown = sorted(set(self.frozen) - set(self.policies.values()))
        if unknown:
            known = ", ".join(sorted(set(self.policies.values())))
            raise ValueError(f"frozen: {unknown[0]!r} plays no agent; accepted: {known}")
        if not self.turn_barrier and self.order is not TurnOrder.MESSAGES:
            raise ValueError(f"turn_barrier: false is not accepted with order {str(self.order)!r}")
        if self.turn_s > self.episode_s:
            raise ValueError(f"turn_s: {self.turn_s} is not accepted; accepted: at most episode_s")
        return self

    @property
    def agents(self) -> tuple[str, ...]:
        """In the order of turns."""
        return tuple(self.policies)

    @property
    def full_leaves(self) -> bool:
        """Whether an agent whose context is full leaves the others; else the episode is truncated."""
        return self.on_death is OnDeath.FORFEIT and len(self.policies) > 1

    @property
    def trained(self) -> tuple[str, ...]:
        """The policies that are updated, each once."""
        return tuple(dict.fromkeys(name for name in self.policies.values() if name not in self.frozen))


def parse_protocol(values: dict[str, object]) -> CoordinationProtocol:
    """A protocol from plain data, as YAML and JSON give it.

    Raises:
        UsageError: the message names each field, its value and what is accepted.
    """
    try:
        return CoordinationProtocol.model_validate(values)
    except ValidationError as error:
        found = []
        for detail in error.errors(include_url=False):
            place = ".".join(str(part) for part in detail["loc"])
            said = detail["msg"].removeprefix("Value error, ")
            found.append(f"{place}: {detail['input']!r:.80}: {said}" if place else said)
        raise UsageError("; ".join(found)) from error
