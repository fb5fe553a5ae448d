"""RLOO (arXiv:2402.14740): each member's returns against the mean of the others of its group."""

from collections.abc import Sequence

from opentinker_core.advantages.means import group_mean, turns_mean


def rloo(returns_G: Sequence[Sequence[float]]) -> list[list[float]]:
    """`A_ik = R_ik - mean(R without R_i)`; G > 1.

    Of a single turn, or of equal ones, it is `G / (G - 1) * (R_i - mean(R))`.
    """
    factor, mean = len(returns_G) / (len(returns_G) - 1), group_mean(returns_G)
    result = []
    for turns in returns_G:
        own = turns_mean(turns)
        result.append([factor * (own - mean) + (value - own) for value in turns])
    return result
