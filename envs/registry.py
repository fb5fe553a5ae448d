"""Environments by id: the own ones, those of other libraries, and classes of other packages.

Ids: `arithmetic`; `<library>/<name>`, such as `reasoning_gym/gcd`; `module.path:ClassName` for a class
of any installed package that takes `split` and its own arguments as keywords.

An id stands for environments of one agent or of several: `make` gives the one, `make_multi` the other,
`make_any` whichever it is.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

from envs.adapters.gymnasium_adapter import gymnasium_environment
from envs.adapters.libraries import adapted
from envs.adapters.openenv_adapter import OpenEnvironment
from envs.adapters.pettingzoo_adapter import pettingzoo_environment
from envs.adapters.textarena_adapter import textarena_environment
from envs.arguments import Argument, arguments_of, check_arguments, unknown
from envs.arithmetic import Arithmetic
from envs.collect import Collect
from envs.gomoku import Gomoku
from envs.gomoku_match import GomokuMatch
from envs.guess_number import GuessNumber
from envs.multi import MultiEnvironment
from envs.negotiate import Negotiate
from envs.protocol import Closes, Environment, Split
from envs.reasoning_gym_adapter import PREFIX, ReasoningGym, make_task
from envs.reasoning_gym_catalog import tasks
from envs.serving.remote import remote
from envs.tool_math import ToolMath

Kind = Literal["single", "multi"]
"""Whether an environment has one agent or several."""
AnyEnvironment = Environment | MultiEnvironment
Factory = Callable[..., AnyEnvironment]

_OWN: dict[str, Callable[..., Environment]] = {
    "arithmetic": Arithmetic,
    "gomoku": Gomoku,
    "guess_number": GuessNumber,
    "tool_math": ToolMath,
}
_OWN_MULTI: dict[str, Callable[..., MultiEnvironment]] = {
    "collect": Collect,
    "gomoku_match": GomokuMatch,
    "negotiate": Negotiate,
}
_EITHER: dict[str, Factory] = {"remote": remote}
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class EnvironmentInfo:
    """What can be made, and with which arguments."""

    id: str
    summary: str
    arguments: tuple[Argument, ...]
    kind: Kind = "single"


@dataclass(frozen=True)
class Library:
    """Environments of another library; their ids begin with its prefix."""

    make: Callable[[str, Split, dict[str, Any]], AnyEnvironment]
    """From the id without its prefix; raises ValueError as `make_any` does, also for an unknown name."""
    infos: Callable[[], list[EnvironmentInfo]]
    """What is installed, with whole ids; imports nothing heavy."""


def available() -> list[EnvironmentInfo]:
    """All shipped environments. Reads reasoning-gym's sources; imports none of its tasks."""
    own = [_info(name, made, "single") for name, made in _OWN.items()]
    several = [_info(name, made, "multi") for name, made in _OWN_MULTI.items()]
    either = [_info(name, made, "single") for name, made in _EITHER.items()]
    return own + several + either + [info for library in _LIBRARIES.values() for info in library.infos()]


def make(id: str, /, split: Split = "train", **args: Any) -> Environment:
    """Make an environment of one agent.

    Raises:
        ValueError: unknown id or argument, a value that is not accepted, or an environment of several
            agents; the message names the field, the value and what is accepted.
    """
    made = _make(id, split, args, "single")
    if isinstance(made, MultiEnvironment):
        agents = _dismissed(made)
        raise ValueError(
            f"environment: {id!r} has the agents {', '.join(agents)}; accepted here: one of a single agent"
        )
    return made


def make_multi(id: str, /, split: Split = "train", **args: Any) -> MultiEnvironment:
    """Make an environment of several agents.

    Raises:
        ValueError: as `make`, and for an environment of one agent.
    """
    made = _make(id, split, args, "multi")
    if not isinstance(made, MultiEnvironment):
        if isinstance(made, Closes):
            made.close()
        raise ValueError(f"environment: {id!r} has a single agent; accepted here: one of several agents")
    return made


def make_any(id: str, /, split: Split = "train", **args: Any) -> AnyEnvironment:
    """Make an environment of one agent or of several, whichever the id stands for.

    Raises:
        ValueError: unknown id or argument, or a value that is not accepted.
    """
    return _make(id, split, args, *get_args(Kind))


def _make(id: str, split: Split, args: dict[str, Any], *wanted: Kind) -> AnyEnvironment:
    """`wanted`: which kinds to name where the id is unknown."""
    if split not in get_args(Split):
        raise ValueError(f"split: {split!r} is not accepted; accepted: {', '.join(get_args(Split))}")
    prefix, slash, name = id.partition("/")
    if slash and (library := _LIBRARIES.get(prefix + slash)):
        return library.make(name, split, args)
    own: Mapping[str, Factory] = {**_OWN, **_OWN_MULTI, **_EITHER}
    factory = _imported(id) if _CLASS.fullmatch(id) else own.get(id)
    if factory is None:
        raise unknown("environment", id, [info.id for info in available() if info.kind in wanted])
    check_arguments(id, factory, args)
    made = factory(split=split, **args)
    if not isinstance(made, Environment):
        raise ValueError(f"environment: {id!r} has no methods reset and step")
    return made


def _dismissed(made: MultiEnvironment) -> tuple[str, ...]:
    """Close what is not wanted; its agents."""
    agents = made.agents
    if isinstance(made, Closes):
        made.close()
    return agents


def _make_task(name: str, split: Split, args: dict[str, Any]) -> Environment:
    own = {argument.name for argument in _adapter_arguments()}
    options = {key: value for key, value in args.items() if key in own}
    check_arguments(PREFIX + name, ReasoningGym, {"task": name} | options)
    rest = {key: value for key, value in args.items() if key not in own}
    return make_task(name, split, rest, options)


def _tasks() -> list[EnvironmentInfo]:
    adapter = _adapter_arguments()
    return [
        EnvironmentInfo(PREFIX + task.name, task.summary, task.arguments + adapter)
        for task in tasks().values()
    ]


def _adapter_arguments() -> tuple[Argument, ...]:
    return tuple(one for one in arguments_of(ReasoningGym) if one.name not in ("task", "args"))


def _adapted(prefix: str, names: str, kind: Kind, adapter: Factory) -> Library:
    """The library of an adapter whose names are not listed: one entry stands for them all."""
    return Library(partial(adapted, prefix, adapter), lambda: [_info(prefix + names, adapter, kind)])


_LIBRARIES: dict[str, Library] = {
    PREFIX: Library(_make_task, _tasks),
    "gymnasium/": _adapted("gymnasium/", "<id>", "single", gymnasium_environment),
    "openenv/": _adapted("openenv/", "<address>", "single", OpenEnvironment),
    "pettingzoo/": _adapted("pettingzoo/", "<module>", "multi", pettingzoo_environment),
    "textarena/": _adapted("textarena/", "<EnvId>", "multi", textarena_environment),
}
"""By prefix, with its slash."""


def _imported(id: str) -> Factory:
    module, _, name = id.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"environment: {id!r}: {error}; accepted: "
            "a class of an installed package or of a folder on PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:  # foreign code
        raise ValueError(
            f"environment: {id!r}: module {module!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        raise ValueError(f"environment: {id!r}: module {module!r} has no class or function {name!r}")
    return cast(Factory, found)


def _info(name: str, made: Factory, kind: Kind) -> EnvironmentInfo:
    return EnvironmentInfo(name, (made.__doc__ or "").strip().splitlines()[0], arguments_of(made), kind)
