"""Opponents from the past: which version plays against the policy that is trained.

Versions are drawn as episodes' tokens are: from (run seed, purpose, agent, step, group, member) and from
nothing else, so that a run that was killed and resumed meets the same opponents.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from opentinker_core.config.league import OpponentConfig, OpponentKind
from opentinker_core.errors import UsageError
from opentinker_core.seeds import derive_seed


class Published(NamedTuple):
    """A version of the opponent's policy, and after how many steps of the run it was published."""

    step: int
    """0: what the run began with."""
    ref: str
    """`name@number`, or `base`."""


@dataclass(frozen=True)
class Seat:
    """Which agent of which episode an opponent is wanted for."""

    agent: str
    step: int
    """The training step whose episodes are played; steps count from 1."""
    group: int
    member: int


def opponent_version(
    config: OpponentConfig, seed: int, seat: Seat, published: Iterable[tuple[int, str]]
) -> str:
    """The version that plays `seat`.

    Args:
        seed: of the run.
        published: (step, ref) of the versions of the opponent's policy, as `Published`; those of equal
            step from the older to the newer. What was published at the seat's step or later is not
            looked at: it may be there after a kill, and was not there before.

    Raises:
        UsageError: `current` or `league`, and nothing was published before the step.
    """
    if config.kind is OpponentKind.FROZEN:
        assert config.version is not None
        return config.version
    before = sorted((one for one in published if one[0] < seat.step), key=lambda one: one[0])
    if not before:
        raise UsageError(
            f"opponent of {seat.agent!r}: no version was published before step {seat.step}; "
            "accepted: one at least, what the run began with"
        )
    refs = [ref for _, ref in before]
    return refs[-1] if config.kind is OpponentKind.CURRENT else _drawn(config, seed, seat, refs)


def _drawn(config: OpponentConfig, seed: int, seat: Seat, refs: Sequence[str]) -> str:
    """`refs` from old to new."""
    member = () if config.per == "group" else (seat.member,)
    place = (seed, "opponent", seat.agent, seat.step, seat.group, *member)
    if (derive_seed(*place, "latest") >> 10) / 2**53 < config.latest_share:
        return refs[-1]
    window = refs[-config.window :] if config.window else refs
    return window[derive_seed(*place, "past") % len(window)]
