"""Calls into an environment, with what it returns checked: third-party code is met at this edge only."""

import math
from numbers import Real
from typing import TypeVar

from envs.protocol import Action, Demonstrates, Environment, Observation, StepResult
from opentinker_core.errors import OpenTinkerError, UsageError

T = TypeVar("T")


def reset(environment: Environment, name: str, seed: int) -> Observation:
    """The first observation.

    Raises:
        OpenTinkerError: `reset` raised, or returned something else: no episode of this environment
            can be trusted then.
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


def step(environment: Environment, name: str, action: Action) -> StepResult | str:
    """The outcome of an action, or how the environment failed: what it raised is one episode's trouble.

    Raises:
        OpenTinkerError: it returned something that is no outcome.
    """
    try:
        result = environment.step(action)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is recorded
        return described(error)
    _expect(result, StepResult, name, "step")
    if not _is_finite(result.reward):
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


def described(error: BaseException) -> str:
    """Type and message of an exception, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _expect(value: object, kind: type[T], name: str, call: str) -> None:
    if not isinstance(value, kind):
        raise OpenTinkerError(
            f"environment {name!r}: {call} returned {type(value).__name__}; accepted: {kind.__name__}"
        )


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False
