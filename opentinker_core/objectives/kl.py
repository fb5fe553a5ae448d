"""KL penalty to a reference policy: the base model (the adapter switched off), or another version."""

from torch import Tensor

from opentinker_core.objectives.types import MAX_LOG_RATIO, Metrics, SignalBatch, required


def kl_per_token(logprobs_M: Tensor, reference_logprobs_M: Tensor) -> Tensor:
    """Estimate KL(pi || ref) per token: the value of k3, the gradient of k2 (straight-through, "k3+").

    With d = log pi - log ref: k3 = e^-d - 1 + d is unbiased and never negative, but its gradient is
    not that of the KL; k2 = d^2/2 has the right expected gradient, d * grad log pi, on tokens sampled
    from pi (Schulman, "Approximating KL divergence", 2020; Tang and Munos, arXiv:2506.09477). Both
    logprobs must be of distributions processed alike (temperature, truncation).
    """
    difference_M = logprobs_M - reference_logprobs_M.detach()
    value_M = _k3(difference_M.detach())
    k2_M = difference_M.square() / 2
    return value_M + (k2_M - k2_M.detach())


def kl_penalty(logprobs_M: Tensor, batch: SignalBatch, coefficient: float) -> tuple[Tensor, Metrics]:
    """`coefficient * sum_t KL_t * scale_t`, to be added to an objective's loss.

    Metrics: `reference_kl`, the sum of k3 over tokens (no `loss` and `tokens` of its own).
    """
    reference_logprobs_M = required("reference_logprobs_M", batch.reference_logprobs_M)
    kl_M = kl_per_token(logprobs_M, reference_logprobs_M)
    return coefficient * (kl_M * batch.token_scales_M).sum(), {"reference_kl": kl_M.detach().sum()}


def _k3(difference_M: Tensor) -> Tensor:
    clamped_M = difference_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return clamped_M.neg().expm1() + difference_M
