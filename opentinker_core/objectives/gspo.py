"""Group sequence policy optimization: the clipped surrogate of a ratio of whole sequences."""

import numpy as np
import torch
from torch import Tensor

from opentinker_core.objectives.clipping import clipped_surrogate, clipped_tokens, ratio_bounds
from opentinker_core.objectives.correction import NO_CORRECTION
from opentinker_core.objectives.mismatch import mismatch_metrics
from opentinker_core.objectives.types import MAX_LOG_RATIO, Metrics, SignalBatch, required


def gspo(
    logprobs_M: Tensor, batch: SignalBatch, *, ratio_low: float = 0.8, ratio_high: float = 1.2
) -> tuple[Tensor, Metrics]:
    """`sum_t -min(r_t A_t, clip(r_t, low, high) A_t) * scale_t`, `r_t = s pi(x_t) / sg(pi(x_t))`.

    `s`, without a gradient, is exp of the mean of log pi - log mu over the tokens of the sequence, each
    weighed by `sequence_mask_M`: the geometric mean of its ratios (GSPO-token, arXiv:2507.18071). A
    sequence is a datum, which is never split. Where the batch has bounds of its own for each token, they
    take the place of these.
    """
    advantages_M = required("advantages_M", batch.advantages_M)
    log_ratio_M = _sequence_log_ratio(logprobs_M, batch)
    ratio_M = (log_ratio_M + logprobs_M - logprobs_M.detach()).exp()
    bounds = ratio_bounds(batch, ratio_low, ratio_high)
    loss_sum = -(clipped_surrogate(ratio_M, advantages_M, bounds) * batch.token_scales_M).sum()
    metrics = mismatch_metrics(logprobs_M, batch, loss_sum, NO_CORRECTION)
    metrics["clip_fraction"] = clipped_tokens(ratio_M, advantages_M, bounds)
    return loss_sum, metrics


@torch.no_grad()
def _sequence_log_ratio(logprobs_M: Tensor, batch: SignalBatch) -> Tensor:
    mask_M = required("sequence_mask_M", batch.sequence_mask_M).double()
    difference_M = (logprobs_M - required("sampler_logprobs_M", batch.sampler_logprobs_M)).double()
    # On the host: a sum by index on a GPU takes its terms in any order.
    index_M = batch.row_M.cpu().numpy()
    sums = np.bincount(index_M, (mask_M * difference_M).cpu().numpy())
    counts = np.bincount(index_M, mask_M.cpu().numpy())
    means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts != 0)
    return torch.as_tensor(
        means[index_M].clip(-MAX_LOG_RATIO, MAX_LOG_RATIO), dtype=logprobs_M.dtype, device=logprobs_M.device
    )
