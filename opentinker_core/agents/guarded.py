"""Calls into an environment, with what it returns checked: third-party code is met at this edge only."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any, TypeVar

from envs.multi import MultiDemonstrates, Situation
from envs.protocol import Action, Demonstrates, Environment, Observation, StepResult
from opentinker_core.digests import canonical_json
from opentinker_core.errors import OpenTinkerError, UsageError

T = TypeVar("T")


def reset(environment: Environment, name: str, seed: int) -> Observation:
    """The first observation.

    Raises:
        OpenTinkerError: `reset` raised, or returned something else.
    """
    try:
        observation = environment.reset(seed)
    except (Exception, SystemExit) as error:
        raise OpenTinkerError(f"environment {name!r}: reset({seed}) raised {described(error)}") from error
    _expect(observation, Observation, name, "reset")
    if not observation.text:
        raise OpenTinkerError(
            f"environment {name!r}: reset({seed}) gave an empty observation; accepted: text"
        )
    return observation


def step(environment: Environment, name: str, action: Action) -> StepResult:
    """The outcome of an action. What the environment raises goes on: it is one episode's trouble.

    Raises:
        OpenTinkerError: it returned something that is no outcome.
    """
    result = environment.step(action)
    _expect(result, StepResult, name, "step")
    if not is_finite(result.reward):
        raise OpenTinkerError(
            f"environment {name!r}: step gave the reward {result.reward!r:.80}; accepted: a finite number"
        )
    return result


def demonstration(environment: Environment, name: str) -> Action:
    """A right action for the current state.

    Raises:
        UsageError: the environment has none.
        OpenTinkerError: it raised, or returned something else.
    """
    if not isinstance(environment, Demonstrates):
        raise UsageError(
            f"sft.data: environment {name!r} has no demonstrations; "
            "accepted: an environment that does, or the path of a JSONL file"
        )
    try:
        action = environment.demonstration()
    except (Exception, SystemExit) as error:
        raise OpenTinkerError(f"environment {name!r}: demonstration() raised {described(error)}") from error
    _expect(action, Action, name, "demonstration")
    return action


def demonstration_of(environment: object, name: str, agent: str) -> Action:
    """As `demonstration`, of one of several agents."""
    if not isinstance(environment, MultiDemonstrates):
        raise UsageError(
            f"sft.data: environment {name!r} has no demonstrations; accepted: an environment that does"
        )
    try:
        action = environment.demonstration(agent)
    except (Exception, SystemExit) as error:
        raise OpenTinkerError(
            f"environment {name!r}: demonstration({agent!r}) raised {described(error)}"
        ) from error
    _expect(action, Action, name, "demonstration")
    return action


def situation(given: Situation) -> Situation:
    """What an environment of several agents gave, with rewards as Python's own numbers.

    Raises:
        TypeError, ValueError: it is no situation, or not one that a record can hold.
    """
    if not isinstance(given, Situation):
        raise TypeError(f"it gave a {type(given).__name__}; accepted: Situation")
    _mapping("observations", given.observations, lambda one: isinstance(one, Observation), "Observation")
    _mapping("rewards", given.rewards, is_finite, "finite numbers")
    if not isinstance(given.to_act, tuple) or not all(isinstance(agent, str) for agent in given.to_act):
        raise TypeError(f"it gave to_act {given.to_act!r:.200}; accepted: a tuple of agents")
    if not isinstance(given.info, Mapping):
        raise TypeError(f"it gave info {given.info!r:.200}; accepted: a dict")
    try:
        canonical_json(dict(given.info))
    except (TypeError, ValueError) as error:
        raise ValueError(f"it gave info {given.info!r:.200}; accepted: JSON values ({error})") from error
    rewards = {
        agent: reward if type(reward) in (bool, int, float) else float(reward)
        for agent, reward in given.rewards.items()
    }
    return replace(given, rewards=rewards)


def _mapping(field: str, given: Any, accepted: Callable[[Any], bool], words: str) -> None:
    if (
        not isinstance(given, Mapping)
        or not all(isinstance(agent, str) for agent in given)
        or not all(accepted(value) for value in given.values())
    ):
        raise TypeError(f"it gave {field} {given!r:.200}; accepted: {words} by agent")


def described(error: BaseException) -> str:
    """Type and message of an exception, on one line, as text that can be stored: without lone surrogates."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return line.encode(errors="backslashreplace").decode()


def _expect(value: object, kind: type[T], name: str, call: str) -> None:
    if not isinstance(value, kind):
        raise OpenTinkerError(
            f"environment {name!r}: {call} returned {type(value).__name__}; accepted: {kind.__name__}"
        )


def is_finite(value: object) -> bool:
    """Whether it is a number that can be a reward."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False
