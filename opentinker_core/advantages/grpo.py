"""GRPO (arXiv:2402.03300): returns standardized within their group."""

import math
from collections.abc import Sequence

from opentinker_core.advantages.dr_grpo import dr_grpo
from opentinker_core.advantages.means import group_mean

EPSILON = 1e-6


def grpo(returns_G: Sequence[Sequence[float]]) -> list[list[float]]:
    """`A_ik = (R_ik - mean(R)) / (std(R) + 1e-6)`.

    `std` is the population's (divided by G, not G - 1): the group is all there is to standardize.
    Groups of little variance (too easy, too hard) are weighted up; `dr_grpo` does not do that.
    """
    centred_G = dr_grpo(returns_G)
    deviation = math.sqrt(group_mean([[value * value for value in turns] for turns in centred_G]))
    return [[value / (deviation + EPSILON) for value in turns] for turns in centred_G]
