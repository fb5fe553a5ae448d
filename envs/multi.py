"""What an environment with several agents is: `reset(seed)` and `step(actions)` both give a `Situation`.

Nouns, beside those of `envs.protocol`: `Situation` (what is new to whom, and who may act now),
`MultiEnvironment` (one episode at a time), `Recomputes` (rewards from the log of actions alone),
`MultiDemonstrates` (good actions, for supervised warm-up). `envs.protocol.Closes` is for these as well.

A situation says who may act and whether the next step waits for all of them. That carries

| | `to_act` | `together` |
|---|---|---|
| strictly alternating games | one agent | either |
| simultaneous moves | all that still play | true |
| conditional turns | whoever is asked, one or several | true |
| free messages | whoever may speak; a step takes those who did | false |

An agent that has gone for good (it crashed, its time is over) is given as `None` in place of an
action; what that does to the others is a rule of the game. A text comes to an agent when the
environment gives it, and is shown to it when it is next asked: others' moves reach an agent as
observations, so that its own turns and what it was shown are one sequence.

PettingZoo's two interfaces fit as follows. AEC: `agents` is `possible_agents`, `to_act` is
`(agent_selection,)`, the observation that of `last()` for this agent, and `rewards` all of
`env.rewards` after a step, for those that did not move as well; agents that are terminated or
truncated are stepped with `None` by the adapter until `agent_selection` is one that plays, and the
episode is over when `env.agents` is empty. Parallel: `to_act` is `env.agents`, `together` is true,
the step's actions are its argument, its observations and rewards are ours. Neither has a word for
an agent that leaves: their adapters end the episode, or play an action that they were told to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from envs.protocol import Action, Observation

Actions = Mapping[str, Action | None]
"""By agent; None: the agent has gone for good. Those who did not act are absent."""
Spoken = Mapping[str, str | None]
"""The actions of a step as a log has them: texts alone."""


@dataclass(frozen=True)
class Situation:
    """What a reset or a step led to."""

    to_act: tuple[str, ...]
    """Who may act now; nobody: the episode is over."""
    together: bool = False
    """The next step takes an action (or None) of each of `to_act`; false: of one or more of them."""
    observations: Mapping[str, Observation] = field(default_factory=dict)
    """What is new, for those to whom something is."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Given by this step, to any agents, whether they moved or not; who is absent gets 0."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON values for the record."""

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return not self.to_act


@runtime_checkable
class MultiEnvironment(Protocol):
    """A shared environment; an instance plays one episode at a time.

    The same seed and actions give the same situations, whatever was played before and in
    whichever process. Nothing in a situation depends on the order in which the actions of one
    step are given.
    """

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of all agents; the same for every episode."""
        ...

    def reset(self, seed: int) -> Situation:
        """Start the episode that belongs to `seed` (0 <= seed < 2**63); nobody is rewarded yet."""
        ...

    def step(self, actions: Actions) -> Situation:
        """Take the actions of one or more agents at once.

        Raises:
            RuntimeError: no episode is running (before `reset`, or after its end).
            ValueError: the actions are not those the situation asks for; nothing has changed.
        """
        ...


@runtime_checkable
class Recomputes(Protocol):
    """An environment that can tell every reward from the log of actions, by code of its own."""

    def recompute(self, seed: int, steps: Sequence[Spoken]) -> list[dict[str, float]]:
        """The rewards of each step of the episode of `seed`, for agents whose reward is not 0."""
        ...


@runtime_checkable
class MultiDemonstrates(Protocol):
    """An environment that can show a good action of each of its agents."""

    def demonstration(self, agent: str) -> Action:
        """A good action of `agent`, one of those who may act now; asking changes nothing.

        Raises:
            RuntimeError: no episode is running.
            ValueError: the agent may not act now.
        """
        ...


def check_actions(situation: Situation, actions: Actions, gone: Sequence[str] = ()) -> None:
    """Refuse a step whose actions are not those that a situation asks for.

    `gone`: agents that have left already. Anybody else may leave, also out of turn.

    Raises:
        RuntimeError: the episode is over.
        ValueError: the message names the agents and who is accepted.
    """
    if situation.done:
        raise RuntimeError("no episode is running: call reset first")
    acting = {agent for agent, action in actions.items() if action is not None}
    leaving = set(actions) - acting
    wanted = set(situation.to_act)
    if not actions or not acting <= wanted or leaving & set(gone):
        raise _refusal(actions, f"one or more of {', '.join(situation.to_act)}")
    if situation.together and acting | (leaving & wanted) != wanted:
        raise _refusal(actions, f"all of {', '.join(situation.to_act)}")


def require_turn(situation: Situation, agent: str) -> None:
    """Refuse a question about an agent that may not act now.

    Raises:
        RuntimeError: the episode is over.
        ValueError: the message names the agent and who may act.
    """
    if situation.done:
        raise RuntimeError("no episode is running: call reset first")
    if agent not in situation.to_act:
        raise ValueError(f"agent: {agent!r} may not act now; accepted: {', '.join(situation.to_act)}")


def _refusal(actions: Actions, accepted: str) -> ValueError:
    return ValueError(f"actions: those of {', '.join(actions) or 'nobody'}; accepted: {accepted}")
