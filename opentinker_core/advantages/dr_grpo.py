"""Dr. GRPO (arXiv:2503.20783): returns centred on the mean of their group, not divided by anything."""

from collections.abc import Sequence

from opentinker_core.advantages.means import group_mean


def dr_grpo(returns_G: Sequence[Sequence[float]]) -> list[list[float]]:
    """`A_ik = R_ik - mean(R)`. Goes with the normalizer `constant`, which removes the length bias."""
    mean = group_mean(returns_G)
    return [[value - mean for value in turns] for turns in returns_G]
