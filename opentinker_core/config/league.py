"""Config of opponents that are not trained: which version of which policy plays."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from opentinker_core.config.common import Frozen, Name
from opentinker_core.errors import UsageError
from opentinker_core.policies.refs import BASE, parse_ref


class OpponentKind(StrEnum):
    """Which version plays."""

    CURRENT = "current"
    """The newest: plain self-play."""
    FROZEN = "frozen"
    """Always the same."""
    LEAGUE = "league"
    """One of those published so far, drawn anew."""


def _fixed(text: str) -> str:
    try:
        fixed = text == BASE or isinstance(parse_ref(text).version, int)
    except UsageError:
        fixed = False
    if not fixed:
        raise ValueError(
            f"{text!r:.100} is no fixed version; accepted: 'name@number' or 'base', as an alias may move"
        )
    return text


class OpponentConfig(Frozen):
    """Who plays an agent whose turns are not trained."""

    kind: OpponentKind = OpponentKind.CURRENT
    policy: Name | None = None
    """With `current` and `league`: whose versions; None: the policy that is trained."""
    version: Annotated[str, AfterValidator(_fixed)] | None = None
    """With `frozen`: `name@number`, or `base`."""
    window: Annotated[int, Field(ge=0)] = 0
    """With `league`: only the newest so many versions take part; 0: all."""
    latest_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """With `league`: how often the newest version plays outright; otherwise each of the window, the newest
    among them, is as likely. 0: uniform; 1: as `current`."""
    per: Literal["group", "episode"] = "group"
    """With `league`: what has one draw. Episodes of a group are compared with each other, and an opponent
    in common keeps its strength out of the comparison."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> "OpponentConfig":
        if (self.version is not None) != (self.kind is OpponentKind.FROZEN):
            given, accepted = (
                ("none", "'name@number' or 'base'") if self.version is None else (self.version, "none")
            )
            raise ValueError(f"version: {given}; accepted with kind {str(self.kind)!r}: {accepted}")
        others = {"policy": (OpponentKind.FROZEN,)} | dict.fromkeys(
            ("window", "latest_share", "per"), (OpponentKind.FROZEN, OpponentKind.CURRENT)
        )
        for field, refused in others.items():
            value, default = getattr(self, field), type(self).model_fields[field].default
            if self.kind in refused and value != default:
                raise ValueError(f"{field}: {value}; accepted with kind {str(self.kind)!r}: {default}")
        return self
