"""Proximal policy optimization: the clipped surrogate."""

import torch
from torch import Tensor

from opentinker_core.objectives.types import Metrics, SignalBatch, log_ratio, required, sampler_metrics


def ppo(
    logprobs_M: Tensor, batch: SignalBatch, *, clip_low: float = 0.2, clip_high: float = 0.28
) -> tuple[Tensor, Metrics]:
    """`sum_t -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) * scale_t` (arXiv:1707.06347).

    `r_t = pi(x_t) / mu(x_t)`: bypass mode, in which the sampler mu takes the place of pi_old, so that
    one ratio covers staleness and the mismatch of sampler and trainer. `clip_high > clip_low` is
    DAPO's clip-higher (arXiv:2503.14476). `clip_fraction` counts the tokens without gradient.
    """
    advantages_M = required("advantages_M", batch.advantages_M)
    sampler_logprobs_M = required("sampler_logprobs_M", batch.sampler_logprobs_M)
    ratio_M = log_ratio(logprobs_M, sampler_logprobs_M).exp()
    clipped_M = ratio_M.clamp(1 - clip_low, 1 + clip_high)
    surrogate_M = torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M)
    loss_sum = -(surrogate_M * batch.token_scales_M).sum()
    metrics = sampler_metrics(logprobs_M, sampler_logprobs_M, loss_sum)
    with torch.no_grad():
        too_high_M = (ratio_M > 1 + clip_high) & (advantages_M > 0)
        too_low_M = (ratio_M < 1 - clip_low) & (advantages_M < 0)
        metrics["clip_fraction"] = (too_high_M | too_low_M).sum().to(loss_sum.dtype)
    return loss_sum, metrics
