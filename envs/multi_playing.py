"""Playing scripted episodes of several agents and writing them down: as `envs.playing` does for one."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from envs.draws import stable_hash
from envs.multi import MultiDemonstrates, MultiEnvironment, Situation
from envs.playing import (
    BrokenError,
    Check,
    Plan,
    call,
    require_action,
    require_number,
    require_observation,
    talk,
)
from envs.protocol import Action, Observation

_LEAVES = 0.5
"""How probable it is at a turn of the script `leave` that somebody does."""


@dataclass(frozen=True)
class MultiEvent:
    """What the environment showed after `reset` (no step), or after a step."""

    situation: Situation
    step: Mapping[str, str | None]

    @property
    def shown(self) -> str:
        """All that was shown, and to whom."""
        texts = {agent: new.text for agent, new in self.situation.observations.items()}
        return json.dumps(texts, sort_keys=True)

    @property
    def rewards(self) -> tuple[float, ...]:
        """All rewards."""
        return tuple(self.situation.rewards.values())

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.situation.done

    @property
    def info(self) -> dict[str, Any]:
        """For the record."""
        return self.situation.info

    def written(self) -> str:
        """One line of JSON; values that JSON cannot hold are written as their type."""
        situation = self.situation
        value = {
            "to_act": situation.to_act,
            "together": situation.together,
            "observations": {
                agent: [asdict(one) for one in new.messages] for agent, new in situation.observations.items()
            },
            "rewards": dict(situation.rewards),
            "info": situation.info,
        }
        return json.dumps(value, sort_keys=True, default=lambda odd: type(odd).__name__)


def scripts(environment: MultiEnvironment) -> tuple[str, ...]:
    """The ways of playing: talk, agents who leave, and demonstrations where there are any."""
    return ("talk", "leave", *(("demonstrate",) if isinstance(environment, MultiDemonstrates) else ()))


def turns(
    environment: MultiEnvironment, seed: int, script: str, max_turns: int, *, backwards: bool = False
) -> Iterator[MultiEvent]:
    """Play one episode, an event at a time.

    With `backwards` the actions of a step are given in the opposite order.

    Raises:
        BrokenError: a method raised, or returned something of the wrong type, or one who left is asked.
    """
    agents = require_agents(environment.agents)
    situation = call(f"reset({seed})", environment.reset, seed)
    if environment.agents != agents:
        raise BrokenError(Check.TYPES, f"agents were {agents}, after a reset {environment.agents}")
    require_situation(situation, agents)
    if situation.done or situation.rewards:
        raise BrokenError(Check.TYPES, f"reset({seed}): nobody may act, or somebody is rewarded already")
    told: set[str] = set()
    _told(situation, told)
    yield MultiEvent(situation, {})
    gone: list[str] = []
    for turn in range(max_turns):
        step = _step(environment, situation, (seed, script, turn), gone)
        situation = take(environment, step, seed, agents, backwards=backwards)
        gone += [agent for agent, text in step.items() if text is None]
        if asked := set(gone) & set(situation.to_act):
            raise BrokenError(Check.LEAVING, f"seed {seed}, turn {turn}: {min(asked)} left and is to act")
        if len(gone) == len(agents) and not situation.done:
            raise BrokenError(Check.LEAVING, f"seed {seed}, turn {turn}: all left, and it is not over")
        _told(situation, told)
        yield MultiEvent(situation, step)
        if situation.done:
            return


def play(environment: MultiEnvironment, plan: Plan) -> dict[str, list[MultiEvent]]:
    """Play all episodes of a plan on one instance; the keys are `seed script`."""
    return {
        f"{seed} {script}": list(turns(environment, seed, script, plan.max_turns))
        for seed in plan.seeds
        for script in scripts(environment)
    }


def written(episodes: Mapping[str, list[MultiEvent]]) -> dict[str, list[str]]:
    """Episodes as lines that can be compared."""
    return {name: [event.written() for event in events] for name, events in episodes.items()}


def take(
    environment: MultiEnvironment,
    step: Mapping[str, str | None],
    seed: int,
    agents: tuple[str, ...],
    *,
    backwards: bool = False,
) -> Situation:
    """Make a step, and look at what it returns.

    Raises:
        BrokenError: it raised, or returned something of the wrong type.
    """
    given = {agent: None if text is None else Action(text) for agent, text in step.items()}
    if backwards:
        given = dict(reversed(given.items()))
    check = Check.LEAVING if None in step.values() else Check.PLAYS
    what = f"step({dict(step)!r:.100}) with seed {seed}"
    situation = call(what, environment.step, given, check=check)
    require_situation(situation, agents)
    return situation


def require_agents(value: object) -> tuple[str, ...]:
    """Raise `BrokenError` unless `value` is a tuple of names, each once."""
    names = isinstance(value, tuple) and all(isinstance(one, str) and one for one in value)
    if not isinstance(value, tuple) or not names or not value or len(set(value)) < len(value):
        raise BrokenError(Check.TYPES, f"agents is {value!r:.80}, not a tuple of names, each once")
    return value


def require_situation(value: object, agents: tuple[str, ...]) -> None:
    """Raise `BrokenError` unless `value` is a situation of these agents, all the way down."""
    if not isinstance(value, Situation):
        raise BrokenError(Check.TYPES, f"a situation is {type(value).__name__}, not Situation")
    if not isinstance(value.to_act, tuple) or len(set(value.to_act)) < len(value.to_act):
        raise BrokenError(Check.TYPES, f"to_act is {value.to_act!r:.60}, not a tuple of names, each once")
    if not isinstance(value.together, bool):
        raise BrokenError(Check.TYPES, f"together is {value.together!r:.40}, not a bool")
    for field in ("observations", "rewards"):
        if not isinstance(getattr(value, field), Mapping):
            raise BrokenError(Check.TYPES, f"{field} is {getattr(value, field)!r:.40}, not by agent")
    if unknown := {*value.to_act, *value.observations, *value.rewards} - set(agents):
        raise BrokenError(Check.TYPES, f"an agent is {unknown.pop()!r:.40}; accepted: {', '.join(agents)}")
    for observation in value.observations.values():
        require_observation(observation)
    for reward in value.rewards.values():
        require_number(reward)
    if not isinstance(value.info, dict):
        raise BrokenError(Check.TYPES, f"info is {type(value.info).__name__}, not a dict")


def _told(situation: Situation, told: set[str]) -> None:
    """Who is to act has been shown something before: a model has to begin with some text."""
    shown: Mapping[str, Observation] = situation.observations
    told |= {agent for agent, new in shown.items() if new.text}
    if lost := set(situation.to_act) - told:
        raise BrokenError(Check.TYPES, f"{min(lost)} is to act and was never shown any text")


def _step(
    environment: MultiEnvironment, situation: Situation, place: tuple[int, str, int], gone: list[str]
) -> dict[str, str | None]:
    """Who does what at a place (seed, script, turn); None: that agent leaves."""
    seed, script, turn = place
    draw = Random(stable_hash("step", seed, script, turn))
    acting = list(situation.to_act)
    if not situation.together:
        acting = [agent for agent in acting if draw.random() < 0.5] or [draw.choice(acting)]
    step: dict[str, str | None] = {agent: _text(environment, agent, place) for agent in acting}
    if script == "leave" and draw.random() < _LEAVES:
        step[draw.choice([agent for agent in environment.agents if agent not in gone])] = None
    return step


def _text(environment: MultiEnvironment, agent: str, place: tuple[int, str, int]) -> str:
    # who leaves does so in the middle of good play, where there is any
    if place[1] == "talk" or not isinstance(environment, MultiDemonstrates):
        return talk(*place, agent)
    return require_action(call(f"demonstration({agent!r})", environment.demonstration, agent)).text
