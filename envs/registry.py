"""Environments by id: the own ones, every reasoning-gym task, and classes of other packages.

Ids: `arithmetic`; `reasoning_gym/<task>`; `module.path:ClassName` for a class of any installed
package that takes `split` and its own arguments as keywords.
"""

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, get_args

from envs.arguments import Argument, arguments_of, check_arguments, unknown
from envs.arithmetic import Arithmetic
from envs.protocol import Environment, Split
from envs.reasoning_gym_adapter import PREFIX, ReasoningGym, make_task
from envs.reasoning_gym_catalog import tasks

_OWN: dict[str, Callable[..., Environment]] = {"arithmetic": Arithmetic}
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class EnvironmentInfo:
    """What can be made, and with which arguments."""

    id: str
    summary: str
    arguments: tuple[Argument, ...]


def available() -> list[EnvironmentInfo]:
    """All shipped environments, by id. Reads reasoning-gym's sources; imports none of its tasks."""
    own = [EnvironmentInfo(name, _first_line(made), arguments_of(made)) for name, made in _OWN.items()]
    adapter = _adapter_arguments()
    gym = [
        EnvironmentInfo(PREFIX + task.name, task.summary, task.arguments + adapter)
        for task in tasks().values()
    ]
    return own + gym


def make(id: str, split: Split = "train", **args: Any) -> Environment:
    """Make an environment.

    Raises:
        ValueError: unknown id or argument, or a value that is not accepted; the message names the
            field, the value and what is accepted.
    """
    if split not in get_args(Split):
        raise ValueError(f"split: {split!r} is not accepted; accepted: {', '.join(get_args(Split))}")
    if id.startswith(PREFIX):
        return _make_task(id.removeprefix(PREFIX), split, args)
    factory = _imported(id) if _CLASS.fullmatch(id) else _OWN.get(id)
    if factory is None:
        raise unknown("environment", id, [*_OWN, *(PREFIX + name for name in tasks())])
    check_arguments(id, factory, args)
    made = factory(split=split, **args)
    if not isinstance(made, Environment):
        raise ValueError(f"environment: {id!r} has no methods reset and step")
    return made


def _make_task(name: str, split: Split, args: dict[str, Any]) -> Environment:
    own = {argument.name for argument in _adapter_arguments()}
    options = {key: value for key, value in args.items() if key in own}
    check_arguments(PREFIX + name, ReasoningGym, {"task": name} | options)
    rest = {key: value for key, value in args.items() if key not in own}
    return make_task(name, split, rest, options)


def _adapter_arguments() -> tuple[Argument, ...]:
    return tuple(one for one in arguments_of(ReasoningGym) if one.name not in ("task", "args"))


def _imported(id: str) -> Callable[..., Environment]:
    module, _, name = id.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"environment: {id!r}: {error}; accepted: "
            "a class of an installed package or of a folder on PYTHONPATH"
        ) from error
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        raise ValueError(f"environment: {id!r}: module {module!r} has no class or function {name!r}")
    return cast(Callable[..., Environment], found)


def _first_line(made: Callable[..., Any]) -> str:
    return (made.__doc__ or "").strip().splitlines()[0]
