"""Direct reward optimization: a policy gradient kept near the sampler by a quadratic penalty."""

from torch import Tensor

from opentinker_core.objectives.correction import NO_CORRECTION
from opentinker_core.objectives.mismatch import mismatch_metrics
from opentinker_core.objectives.types import Metrics, SignalBatch, required


def dro(logprobs_M: Tensor, batch: SignalBatch, *, beta: float = 0.05) -> tuple[Tensor, Metrics]:
    """`sum_t -(A_t log pi(x_t) - beta / 2 (log pi(x_t) - log mu(x_t))^2) * scale_t` (arXiv:2405.19107).

    There is no ratio: data may come from any policy whose logprobs are known. The penalty holds at every
    position, also at those whose advantage is 0.
    """
    advantages_M = required("advantages_M", batch.advantages_M)
    difference_M = logprobs_M - required("sampler_logprobs_M", batch.sampler_logprobs_M)
    objective_M = advantages_M * logprobs_M - 0.5 * beta * difference_M.square()
    loss_sum = -(objective_M * batch.token_scales_M).sum()
    return loss_sum, mismatch_metrics(logprobs_M, batch, loss_sum, NO_CORRECTION)
