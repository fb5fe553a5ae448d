"""What a coordinator can do wrong: `Check`, and `Violation`, one case of it."""

from dataclasses import dataclass
from enum import StrEnum


class Check(StrEnum):
    """What a coordinator must keep to."""

    ORDER = "order"
    """Only those act whom environment and declared order let act."""
    DOUBLE_MOVE = "double_move"
    """One answer a turn: nobody is asked again after a good one, or moves in another's place."""
    TURN_BARRIER = "turn_barrier"
    """In a common round all are asked before anybody answers, and all have answered before the step."""
    INVENTED = "invented"
    """The environment takes, and agents are shown, only what was really said."""
    LOST_MESSAGE = "lost_message"
    """What the environment told an agent is shown to it, and what it answered is played."""
    ATTEMPTS = "attempts"
    """Retries as declared; the answer of a dead attempt is never used."""
    DEATH = "death"
    """A death is declared after the last attempt, the environment is told, the protocol followed."""
    GLOBAL_BARRIER = "global_barrier"
    """A phase begins when the one before it has ended in all policies."""
    VERSION = "version"
    """Within a generation a policy is sampled from one version: the one it was refreshed to."""
    REWARD = "reward"
    """Rewards are those that the actions earn, each agent's own, or missing where they must be."""
    CREDIT = "credit"
    """A policy is trained on its agents' own turns, each once, and frozen ones not at all."""
    END = "end"
    """Every episode ends once, with a reason that is true."""


@dataclass(frozen=True)
class Violation:
    """One thing that was not as it must be."""

    check: Check
    detail: str
    episode: str = ""
    number: int = -1
    """Of the event at which it showed; -1: at the end of the episode."""
