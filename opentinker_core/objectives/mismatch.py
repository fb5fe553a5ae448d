"""How far sampler and trainer are apart, measured before anything is truncated, masked or clipped.

Axes: M trained positions of a micro-batch.
"""

import torch
from torch import Tensor

from opentinker_core.config.schema import CorrectionConfig, CorrectionKind, CorrectionLevel
from opentinker_core.objectives.correction import (
    NO_CORRECTION,
    correction_weights,
    sequence_log_ratios,
    sequences_of,
    token_log_ratios,
    trainer_logprobs,
)
from opentinker_core.objectives.types import Metrics, SignalBatch, required


@torch.no_grad()
def mismatch_metrics(
    logprobs_M: Tensor, batch: SignalBatch, loss_sum: Tensor, correction: CorrectionConfig
) -> Metrics:
    """Loss, tokens, and what r = pi_old / mu looks like, as accumulators (see `objectives.types`).

    `ratio_min`, `ratio_mean`, `ratio_max`; `ratio_ess`, the effective sample size as a share of the
    tokens, (mean r)^2 / mean r^2; `ratio_outside`, the share out of bounds (of the correction if it is
    one of tokens, else 0.5 to 2). `sampler_kl_k1` and `sampler_kl_k3`: the tokens are samples of mu, so that
    k1 = -log r and k3 = r - 1 - log r (Schulman, "Approximating KL divergence", 2020) both have the
    mean KL(mu || pi_old).

    With a correction: `correction_weight_mean`; and where its level is a trajectory, the same five of the
    trajectories' ratios, `sequence_ratio_...`, each trajectory counted once.
    """
    by_token = correction.level is CorrectionLevel.TOKEN
    low, high = (correction if by_token else NO_CORRECTION).bounds
    log_ratio_M = token_log_ratios(logprobs_M, batch)
    k1_M = required("sampler_logprobs_M", batch.sampler_logprobs_M) - trainer_logprobs(logprobs_M, batch)
    metrics = {
        "loss": loss_sum.detach(),
        "tokens": torch.full_like(loss_sum, logprobs_M.numel()),
        "sampler_kl_k1": k1_M.sum(),
        "sampler_kl_k3": (log_ratio_M.exp() - 1 + k1_M).sum(),
    } | _spread("ratio", log_ratio_M.exp(), torch.ones_like(log_ratio_M), low, high)
    if correction.kind is CorrectionKind.NONE:
        return metrics
    metrics["correction_weight_mean"] = correction_weights(logprobs_M, batch, correction).sum()
    if by_token:
        return metrics
    _, tokens_M = sequences_of(batch)
    # A trajectory may have rows in several micro-batches: each of its tokens brings its part of one count.
    part_M = 1 / torch.as_tensor(tokens_M, dtype=log_ratio_M.dtype, device=log_ratio_M.device)
    ratio_M = sequence_log_ratios(logprobs_M, batch, correction.level).exp()
    return (
        metrics | {"sequences": part_M.sum()} | _spread("sequence_ratio", ratio_M, part_M, *correction.bounds)
    )


def _spread(name: str, ratio_M: Tensor, part_M: Tensor, low: float, high: float) -> Metrics:
    outside_M = (ratio_M < low) | (ratio_M > high)
    return {
        f"{name}_mean": (part_M * ratio_M).sum(),
        f"{name}_square": (part_M * ratio_M.square()).sum(),
        f"{name}_min": ratio_M.min(),
        f"{name}_max": ratio_M.max(),
        f"{name}_outside": (part_M * outside_M).sum(),
    }
