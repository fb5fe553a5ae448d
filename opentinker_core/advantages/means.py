"""Means that do not depend on the order of what is averaged."""

import math
from collections.abc import Iterable, Sequence


def mean(values: Sequence[float]) -> float:
    """The mean of `values`, not empty: an exact sum, divided, so that their order cannot matter."""
    return math.fsum(values) / len(values)


def turns_mean(turns: Sequence[float]) -> float:
    """The mean over the turns of one member; where they are equal, this value to the bit."""
    return turns[0] if len(set(turns)) == 1 else mean(turns)


def group_mean(turns_G: Iterable[Sequence[float]]) -> float:
    """The mean over the members of a group: each counts once, however many turns it has."""
    return mean([turns_mean(turns) for turns in turns_G])
