"""Supervised loss: weighted negative log-likelihood."""

import torch
from torch import Tensor

from opentinker_core.objectives.types import Metrics, SignalBatch, required


def cross_entropy(logprobs_M: Tensor, batch: SignalBatch) -> tuple[Tensor, Metrics]:
    """`sum_t -w_t * log pi(x_t) * scale_t`; the gradient of importance sampling at ratio 1 with A = w.

    Weights may have any sign. Metrics: `loss`, `tokens`, and `nll`, the unweighted mean of `-log pi`.
    """
    weights_M = required("weights_M", batch.weights_M)
    loss_sum = -(weights_M * logprobs_M * batch.token_scales_M).sum()
    return loss_sum, {
        "loss": loss_sum.detach(),
        "tokens": torch.full_like(loss_sum.detach(), logprobs_M.numel()),
        "nll": -logprobs_M.detach().sum(),
    }
