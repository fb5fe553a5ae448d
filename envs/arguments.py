"""What arguments an environment takes, and refusing wrong ones with a message that helps."""

import difflib
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Argument:
    """One argument of an environment."""

    name: str
    kind: str
    """Its type as Python writes it."""
    default: str
    """Its default as Python writes it; empty: it must be given."""


def unknown(field: str, value: str, accepted: Iterable[str]) -> ValueError:
    """The error for a name that does not exist: close matches if there are any, else what does exist."""
    names = sorted(accepted)
    close = difflib.get_close_matches(value, names, n=4)
    if close:
        hint = f"did you mean {', '.join(close)}?"
    else:
        hint = f"accepted: {', '.join(names[:12]) or 'none'}{', ...' if len(names) > 12 else ''}"
    return ValueError(f"{field}: {value!r:.80} does not exist; {hint}")


def require(name: str, value: object, holds: bool, accepted: str) -> None:
    """Refuse the value of an argument unless `holds`.

    Raises:
        ValueError: it does not; the message names the argument, the value and what is accepted.
    """
    if not holds:
        raise ValueError(f"{name}: {value!r:.80} is not accepted; accepted: {accepted}")


def arguments_of(factory: Callable[..., Any]) -> tuple[Argument, ...]:
    """The keyword arguments of a factory, `split` excepted."""
    return tuple(
        Argument(
            parameter.name,
            _written(parameter.annotation),
            "" if parameter.default is parameter.empty else repr(parameter.default),
        )
        for parameter in _parameters(factory)
    )


def check_arguments(field: str, factory: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Check names and types of `args` against a factory's signature.

    Raises:
        ValueError: an argument is unknown, missing, or has the wrong type.
    """
    parameters = {parameter.name: parameter for parameter in _parameters(factory)}
    hints = get_type_hints(factory.__init__ if isinstance(factory, type) else factory)  # type: ignore[misc]
    for name, value in args.items():
        if name not in parameters:
            raise unknown(f"{field}: argument", name, parameters)
        hint = hints.get(name, Any)
        if not fits(value, hint):
            raise ValueError(f"{field}: {name}: {value!r:.80} is not accepted; accepted: {_written(hint)}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in args:
            raise ValueError(f"{field}: argument {name!r} is missing; accepted: {_written(hints.get(name))}")


def fits(value: Any, hint: Any) -> bool:
    """Whether `value`, as YAML or JSON gives it, fits a type hint; hints beyond plain data fit all."""
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in get_args(hint))
    if origin in (list, tuple, Sequence) or hint in (list, tuple):
        items = next((item for item in get_args(hint) if item is not Ellipsis), Any)
        return isinstance(value, list | tuple) and all(fits(item, items) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str, dict):
        return isinstance(value, hint)
    return value is None if hint in (None, type(None)) else True


def _parameters(factory: Callable[..., Any]) -> list[inspect.Parameter]:
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.kind in keywords and parameter.name != "split"
    ]


def _written(hint: Any) -> str:
    if hint is None or hint is inspect.Parameter.empty:
        return "any"
    return (
        hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
    )
