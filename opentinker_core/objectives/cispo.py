"""CISPO: REINFORCE whose importance weight is clipped instead of its gradient."""

import torch
from torch import Tensor

from opentinker_core.objectives.clipping import clipped, ratio_bounds
from opentinker_core.objectives.correction import NO_CORRECTION
from opentinker_core.objectives.mismatch import mismatch_metrics
from opentinker_core.objectives.types import Metrics, SignalBatch, log_ratio, required


def cispo(
    logprobs_M: Tensor, batch: SignalBatch, *, ratio_low: float = 0.0, ratio_high: float = 4.0
) -> tuple[Tensor, Metrics]:
    """`sum_t -sg(clip(r_t, low, high)) A_t log pi(x_t) * scale_t`, `r_t = pi / mu` (arXiv:2506.13585).

    No token loses its gradient. Where the batch has bounds of its own for each token, they take the
    place of these. `clip_fraction` counts the tokens whose weight is a bound.
    """
    advantages_M = required("advantages_M", batch.advantages_M)
    sampler_logprobs_M = required("sampler_logprobs_M", batch.sampler_logprobs_M)
    with torch.no_grad():
        ratio_M = log_ratio(logprobs_M, sampler_logprobs_M).exp()
        weight_M = clipped(ratio_M, ratio_bounds(batch, ratio_low, ratio_high))
    loss_sum = -(weight_M * advantages_M * logprobs_M * batch.token_scales_M).sum()
    metrics = mismatch_metrics(logprobs_M, batch, loss_sum, NO_CORRECTION)
    metrics["clip_fraction"] = (weight_M != ratio_M).sum().to(loss_sum.dtype)
    return loss_sum, metrics
