"""Proximal policy optimization: the clipped surrogate."""

from torch import Tensor

from opentinker_core.config.schema import CorrectionConfig
from opentinker_core.objectives.clipping import clipped_surrogate, clipped_tokens, ratio_bounds
from opentinker_core.objectives.correction import NO_CORRECTION, ratio_and_weight
from opentinker_core.objectives.mismatch import mismatch_metrics
from opentinker_core.objectives.types import Metrics, SignalBatch, required


def ppo(
    logprobs_M: Tensor,
    batch: SignalBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    correction: CorrectionConfig = NO_CORRECTION,
) -> tuple[Tensor, Metrics]:
    """`sum_t -w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) * scale_t` (arXiv:1707.06347).

    Without a correction `w_t = 1` and `r_t = pi(x_t) / mu(x_t)`: bypass mode, in which the sampler mu takes
    the place of pi_old, so that one ratio covers staleness and the mismatch of sampler and trainer.
    With one the clip is around pi_old, `r_t = pi(x_t) / pi_old(x_t)`, and `w_t` is the bounded weight of
    pi_old / mu. On the first step of an update pi_old is pi, and nothing is clipped.

    `clip_high > clip_low` is DAPO's clip-higher (arXiv:2503.14476). Where the batch has bounds of its own
    for each token, they take the place of these. `clip_fraction` counts the tokens without gradient.
    """
    advantages_M = required("advantages_M", batch.advantages_M)
    ratio_M, weight_M = ratio_and_weight(logprobs_M, batch, correction)
    bounds = ratio_bounds(batch, 1 - clip_low, 1 + clip_high)
    surrogate_M = clipped_surrogate(ratio_M, advantages_M, bounds)
    loss_sum = -(weight_M * surrogate_M * batch.token_scales_M).sum()
    metrics = mismatch_metrics(logprobs_M, batch, loss_sum, correction)
    metrics["clip_fraction"] = clipped_tokens(ratio_M, advantages_M, bounds)
    return loss_sum, metrics
