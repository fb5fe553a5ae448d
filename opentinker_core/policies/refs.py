"""References to policy versions: `name` (its latest), `name@3`, `name@best`."""

import re
from dataclasses import dataclass

from opentinker_core.errors import UsageError
from opentinker_core.names import NAME_RULE, check_name

LATEST = "latest"
BASE = "base"
DEMONSTRATION = "demonstration"
RESERVED = frozenset({BASE, DEMONSTRATION})
"""What may stand for a version where something was sampled; no policy may have these names."""

_NUMBER = re.compile(r"[0-9]{1,9}\Z")


@dataclass(frozen=True)
class Ref:
    """A policy's name and one of its versions, by number or by alias."""

    policy: str
    version: int | str = LATEST

    def __str__(self) -> str:
        return f"{self.policy}@{self.version}"


def parse_ref(text: str) -> Ref:
    """Read `name`, `name@number` or `name@alias`.

    Raises:
        UsageError: it is none of them.
    """
    name, separator, version = str(text).partition("@")
    try:
        check_name("policy", name)
        if not separator:
            return Ref(name)
        return Ref(name, int(version) if _NUMBER.match(version) else check_alias(version))
    except UsageError as error:
        raise UsageError(
            f"version: {text!r:.100} is not a reference; accepted: 'name', 'name@number', 'name@alias'"
        ) from error


def check_alias(alias: str) -> str:
    """Return `alias` if it is a safe name that cannot be taken for a number.

    Raises:
        UsageError: it is not.
    """
    check_name("alias", alias)
    if alias.isdigit():
        raise UsageError(
            f"alias: {alias!r:.80} would be a version number; accepted: {NAME_RULE}, not all digits"
        )
    return alias
