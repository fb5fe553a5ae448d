"""GRPO (arXiv:2402.03300): rewards standardized within their group."""

import math
from collections.abc import Sequence

from opentinker_core.advantages.dr_grpo import dr_grpo

EPSILON = 1e-6


def grpo(rewards_G: Sequence[float]) -> list[float]:
    """`A_i = (R_i - mean(R)) / (std(R) + 1e-6)`.

    `std` is the population's (divided by G, not G - 1): the group is all there is to standardize.
    Groups of little variance (too easy, too hard) are weighted up; `dr_grpo` does not do that.
    """
    centred_G = dr_grpo(rewards_G)
    deviation = math.sqrt(math.fsum(value * value for value in centred_G) / len(centred_G))
    return [value / (deviation + EPSILON) for value in centred_G]
