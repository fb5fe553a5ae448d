"""REINFORCE with importance sampling from the sampler's distribution."""

from torch import Tensor

from opentinker_core.objectives.types import Metrics, SignalBatch, log_ratio, required, sampler_metrics


def importance_sampling(logprobs_M: Tensor, batch: SignalBatch) -> tuple[Tensor, Metrics]:
    """`sum_t -r_t * A_t * scale_t` with `r_t = pi(x_t) / mu(x_t)`, mu being the sampler.

    At r = 1 the gradient is that of REINFORCE (Williams, 1992). Nothing is clipped, so the
    variance grows with staleness: meant for on-policy data.
    """
    advantages_M = required("advantages_M", batch.advantages_M)
    sampler_logprobs_M = required("sampler_logprobs_M", batch.sampler_logprobs_M)
    ratio_M = log_ratio(logprobs_M, sampler_logprobs_M).exp()
    loss_sum = -(ratio_M * advantages_M * batch.token_scales_M).sum()
    return loss_sum, sampler_metrics(logprobs_M, sampler_logprobs_M, loss_sum)
