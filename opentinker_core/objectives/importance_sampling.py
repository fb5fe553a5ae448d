"""REINFORCE with importance sampling from the sampler's distribution."""

from torch import Tensor

from opentinker_core.config.schema import CorrectionConfig
from opentinker_core.objectives.correction import NO_CORRECTION, ratio_and_weight
from opentinker_core.objectives.mismatch import mismatch_metrics
from opentinker_core.objectives.types import Metrics, SignalBatch, required


def importance_sampling(
    logprobs_M: Tensor, batch: SignalBatch, *, correction: CorrectionConfig = NO_CORRECTION
) -> tuple[Tensor, Metrics]:
    """`sum_t -r_t * A_t * scale_t` with `r_t = pi(x_t) / mu(x_t)`, mu being the sampler.

    At r = 1 the gradient is that of REINFORCE (Williams, 1992). Without a correction nothing is
    bounded, so the variance grows with staleness: meant for on-policy data. With one it is
    `sum_t -w_t * (pi / pi_old)(x_t) * A_t * scale_t`, `w` the bounded weight of pi_old / mu.
    """
    advantages_M = required("advantages_M", batch.advantages_M)
    ratio_M, weight_M = ratio_and_weight(logprobs_M, batch, correction)
    loss_sum = -(weight_M * ratio_M * advantages_M * batch.token_scales_M).sum()
    return loss_sum, mismatch_metrics(logprobs_M, batch, loss_sum, correction)
