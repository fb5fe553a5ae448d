"""A scripted negotiator: asks for much, concedes with time, and accepts what is no worse than its next offer.

It knows its own values, and of the others only what they offered. The target that falls with time is
the time-dependent tactic of Faratin et al. 1998, "Negotiation decision functions for autonomous agents".
"""

from collections.abc import Sequence
from dataclasses import dataclass

from envs.negotiate_rules import WORTH, Division, Row, minus, shares, worth, written_offer


@dataclass(frozen=True)
class View:
    """What an agent knows when it is to speak."""

    agent: int
    agents: int
    counts: Row
    values: Row
    """Its own."""
    offers: Sequence[tuple[int, Division]]
    """All so far, and whose they are."""
    stands: bool
    """Whether the last of them can be accepted by this agent."""
    spoken: int
    """Messages of this agent so far."""
    messages: int
    """Those it has in all."""


def say(view: View) -> str:
    """A good message: an offer, or `ok`."""
    share = _wanted(view)
    if view.stands:
        offered = worth(view.offers[-1][1][view.agent], view.values)
        is_last = view.spoken == view.messages - 1
        if offered >= worth(share, view.values) or (is_last and offered > 0):
            return "ok"
    return written_offer(_divided(view, share), view.agent)


def _wanted(view: View) -> Row:
    """Of all shares that reach its target, that which takes least of what the others ask for."""
    conceded = view.spoken / max(1, view.messages - 1)
    target = WORTH * (1 - conceded * (1 - 1 / view.agents))
    others = [agent for agent in range(view.agents) if agent != view.agent]
    wishes = [max(column) for column in zip(*(_wishes(view, other) for other in others), strict=True)]

    def cost(share: Row) -> tuple[float, int, Row]:
        taken = sum(count * wish for count, wish in zip(share, wishes, strict=True))
        return taken, -worth(share, view.values), share

    return min((share for share in shares(view.counts) if worth(share, view.values) >= target), key=cost)


def _wishes(view: View, other: int) -> list[float]:
    """The share of each kind that another agent asked for, on average, from 0.1 to 1; 1 before it asked."""
    asked = [division[other] for author, division in view.offers if author == other]
    if not asked:
        return [1.0] * len(view.counts)
    return [
        0.1 + 0.9 * sum(share[kind] for share in asked) / (len(asked) * count)
        for kind, count in enumerate(view.counts)
    ]


def _divided(view: View, share: Row) -> Division:
    """The share for itself, and each other item to who asks for it most and got least so far."""
    others = [agent for agent in range(view.agents) if agent != view.agent]
    wishes = {other: _wishes(view, other) for other in others}
    rows = {other: [0] * len(view.counts) for other in others}
    got = dict.fromkeys(others, 0.0)
    for kind, left in enumerate(minus(view.counts, share)):
        for _ in range(left):
            taker = max(others, key=lambda other: (wishes[other][kind] / (1 + got[other]), -other))
            rows[taker][kind] += 1
            got[taker] += wishes[taker][kind]
    return tuple(share if agent == view.agent else tuple(rows[agent]) for agent in range(view.agents))
