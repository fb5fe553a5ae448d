"""Dr. GRPO (arXiv:2503.20783): rewards centred on the mean of their group, not divided by anything."""

import math
from collections.abc import Sequence


def dr_grpo(rewards_G: Sequence[float]) -> list[float]:
    """`A_i = R_i - mean(R)`. Goes with the normalizer `constant`, which removes the length bias."""
    # fsum is exact, so that the order of the members cannot matter.
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]
