"""What the adapters ask of their libraries' packages, and of the arguments that they are given."""

import importlib.util
import json
from collections.abc import Callable
from typing import Any

from envs.arguments import arguments_of, check_arguments
from envs.draws import stable_hash
from envs.protocol import Split

EXTRA = "pip install 'opentinker[envs]'"


class RefusedError(Exception):
    """A library's environment cannot be played by an adapter; the message says why."""


def library_seed(*parts: int | str) -> int:
    """A seed that any library takes, below 2**31."""
    return stable_hash(*parts) % 2**31


def shown(begun: list[list[str]] | dict[str, Any]) -> str:
    """What an episode shows first, to whomever (as `envs.serving.wire` has it): what problems are told by."""
    views = [begun] if isinstance(begun, list) else list(begun["observations"].values())
    return "\x1e".join(content for view in views for _, content in view)


def require_package(id: str, package: str) -> None:
    """Refuse an environment whose library is not installed.

    Raises:
        ValueError: names the environment, the package and how it is installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"environment: {id!r} needs the package {package!r}: {EXTRA}")


def adapted(prefix: str, adapter: Callable[..., Any], name: str, split: Split, args: dict[str, Any]) -> Any:
    """Make an adapter's environment; arguments that are not the adapter's own are the library's.

    Raises:
        ValueError: an argument has the wrong type, a library's is no plain data, or the library refuses it.
    """
    own = {argument.name for argument in arguments_of(adapter)} - {"name", "args"}
    options = {key: value for key, value in args.items() if key in own}
    check_arguments(prefix + name, adapter, {"name": name} | options)
    rest = {key: value for key, value in args.items() if key not in own}
    for key, value in rest.items():
        try:
            json.dumps(value)
        except TypeError:
            accepted = "accepted: plain data"
            raise ValueError(f"{prefix}{name}: {key}: {value!r:.80} is not accepted; {accepted}") from None
    return adapter(name, split, rest, **options)
