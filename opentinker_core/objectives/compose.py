"""The RL loss of a config: its objective plus the KL penalty to the reference policy."""

from functools import partial

from torch import Tensor

from opentinker_core.config.schema import ObjectiveConfig
from opentinker_core.objectives.importance_sampling import importance_sampling
from opentinker_core.objectives.kl import kl_penalty
from opentinker_core.objectives.ppo import ppo
from opentinker_core.objectives.types import Metrics, Objective, SignalBatch


def rl_objective(config: ObjectiveConfig) -> Objective:
    """The objective that `config` describes.

    With `kl_coefficient` > 0 it needs `reference_logprobs_M` and its metric `loss` includes the penalty.
    """
    surrogate: Objective = partial(importance_sampling, correction=config.correction)
    if config.name == "ppo":
        surrogate = partial(
            ppo, clip_low=config.clip_low, clip_high=config.clip_high, correction=config.correction
        )
    if config.kl_coefficient == 0:
        return surrogate

    def with_penalty(logprobs_M: Tensor, batch: SignalBatch) -> tuple[Tensor, Metrics]:
        loss_sum, metrics = surrogate(logprobs_M, batch)
        penalty_sum, penalty_metrics = kl_penalty(logprobs_M, batch, config.kl_coefficient)
        total = loss_sum + penalty_sum
        return total, metrics | penalty_metrics | {"loss": total.detach()}

    return with_penalty
