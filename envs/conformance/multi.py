"""What environments of several agents are checked for beyond what is shared."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from envs.conformance.subject import NotCheckableError, Subject
from envs.multi import MultiDemonstrates, MultiEnvironment, Recomputes, Situation
from envs.multi_playing import MultiEvent, require_situation, take, turns
from envs.playing import BrokenError, Check, call, require_action
from envs.protocol import Action

_NOBODY = "nobody of this name"
_TOLERANCE = 1e-9


def _demonstration(subject: Subject) -> None:
    """Playable (the script `demonstrate` was), for those alone who may act, and without effect."""
    environment = subject.instance
    if not isinstance(environment, MultiDemonstrates):
        raise NotCheckableError("it has none")
    for name in subject.episodes:
        seen = []
        for event in _again(subject, environment, name):
            seen.append(event)
            _demonstrates(environment, event.situation, name)
        subject.compare(name, list(seen))


def _demonstrates(environment: Any, situation: Situation, name: str) -> None:
    refused = RuntimeError if situation.done else ValueError
    for agent in environment.agents:
        if agent in situation.to_act:
            shown = [require_action(call("demonstration", environment.demonstration, agent)) for _ in "ab"]
            if shown[0] != shown[1]:
                raise BrokenError(Check.DEMONSTRATION, f"{name!r}: asked twice, {agent} has two answers")
            continue
        try:
            environment.demonstration(agent)
        except refused:
            continue
        except Exception as error:
            raise BrokenError(
                Check.DEMONSTRATION, f"{name!r}: {agent} may not act; it raised {error!r:.80}"
            ) from error
        raise BrokenError(Check.DEMONSTRATION, f"{name!r}: {agent} may not act, and is shown something")


def _action_order(subject: Subject) -> None:
    environment = subject.new()
    for name in subject.episodes:
        seed, _, script = name.partition(" ")
        played = turns(environment, int(seed), script, subject.plan.max_turns, backwards=True)
        subject.compare(name, list(played))


def _refusal(subject: Subject) -> None:
    environment = subject.new()
    for name in subject.episodes:
        seen: list[MultiEvent] = []
        gone: set[str] = set()
        for event in _again(subject, environment, name):
            seen.append(event)
            gone |= {agent for agent, text in event.step.items() if text is None}
            for actions in _wrong(environment.agents, event.situation, gone):
                _must_refuse(environment, actions, f"{name!r}, turn {len(seen) - 1}")
        subject.compare(name, list(seen))


def _wrong(agents: Sequence[str], situation: Situation, gone: set[str]) -> Iterator[dict[str, Action | None]]:
    """Actions that a situation does not ask for."""
    if situation.done:
        return
    asked: dict[str, Action | None] = {agent: Action("7") for agent in situation.to_act}
    yield {}
    yield asked | {_NOBODY: Action("7")}
    for agent in agents:
        if agent not in asked:
            yield asked | {agent: Action("7")}
        if agent in gone:
            yield asked | {agent: None}
        if situation.together and agent in asked and len(asked) > 1:
            yield {one: action for one, action in asked.items() if one != agent}


def _must_refuse(environment: MultiEnvironment, actions: Mapping[str, Action | None], where: str) -> None:
    given = {agent: action and action.text for agent, action in actions.items()}
    try:
        environment.step(actions)
    except ValueError:
        return
    except Exception as error:
        raise BrokenError(
            Check.REFUSAL, f"{where}: step({given}) raised {error!r:.80}, not ValueError"
        ) from error
    raise BrokenError(Check.REFUSAL, f"{where}: step({given}) was taken")


def _leaving(subject: Subject) -> None:
    """Each leaves at the beginning, in turn or not; then all at once. The script `leave` does it later."""
    environment, seed = subject.new(), subject.plan.seeds[0]
    agents = environment.agents
    for leaving in [*([agent] for agent in agents), list(agents)]:
        situation = call(f"reset({seed})", environment.reset, seed)
        require_situation(situation, agents)
        others = [agent for agent in situation.to_act if agent not in leaving]
        step: dict[str, str | None] = dict.fromkeys(leaving)
        if situation.together:
            step |= dict.fromkeys(others, "7")
        situation = take(environment, step, seed, agents)
        if still := set(leaving) & set(situation.to_act):
            raise BrokenError(Check.LEAVING, f"seed {seed}: {min(still)} left at first and is to act")
        if len(leaving) == len(agents) and not situation.done:
            raise BrokenError(Check.LEAVING, f"seed {seed}: all left at first, and it is not over")


def _recompute(subject: Subject) -> None:
    environment, other = subject.new(), subject.new()
    if not isinstance(environment, Recomputes):
        raise NotCheckableError("it does not recompute")
    for name in subject.episodes:
        seen: list[MultiEvent] = []
        for event in _again(subject, environment, name):
            seen.append(event)
            if len(seen) == 2:  # in the middle of the episode, which goes on
                _recomputes(environment, name, seen)
        subject.compare(name, list(seen))
        _recomputes(environment, name, seen)
        _recomputes(other, name, seen)


def _recomputes(environment: Recomputes, name: str, seen: Sequence[MultiEvent]) -> None:
    seed = int(name.partition(" ")[0])
    steps = [dict(event.step) for event in seen[1:]]
    given = [dict(event.situation.rewards) for event in seen[1:]]
    found = call(f"recompute({seed}, {len(steps)} steps)", environment.recompute, seed, steps)
    if len(found) != len(given) or not all(map(_same, found, given)):
        raise BrokenError(Check.RECOMPUTE, f"{name!r}: {given} was given, {found} recomputed")


def _same(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Who is absent gets 0; the code is not the same, and so the last digits need not be."""
    return all(abs(one.get(agent, 0.0) - other.get(agent, 0.0)) <= _TOLERANCE for agent in {*one, *other})


def _again(subject: Subject, environment: Any, name: str) -> Iterator[MultiEvent]:
    seed, _, script = name.partition(" ")
    return turns(environment, int(seed), script, subject.plan.max_turns)


CHECKS: dict[Check, Callable[[Subject], None]] = {
    Check.DEMONSTRATION: _demonstration,
    Check.ACTION_ORDER: _action_order,
    Check.REFUSAL: _refusal,
    Check.LEAVING: _leaving,
    Check.RECOMPUTE: _recompute,
}
