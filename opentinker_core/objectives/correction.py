"""Importance weights between sampler and trainer, truncated or masked, of tokens or of whole trajectories.

mu is the sampler, pi_old the trainer's policy when an update begins, pi the policy at hand. Then
pi / mu = (pi_old / mu) (pi / pi_old): the first factor is a mismatch of two programs (and the age of
the data), nothing to learn from; the second is the update. A correction weighs the loss by the first,
within bounds and without gradient, and leaves the second to the objective.

Axes: M trained positions of a micro-batch.
"""

import numpy as np
import torch
from torch import Tensor

from opentinker_core.config.schema import CorrectionConfig, CorrectionKind, CorrectionLevel
from opentinker_core.errors import UsageError
from opentinker_core.objectives.types import MAX_LOG_RATIO, SignalBatch, log_ratio, required

NO_CORRECTION = CorrectionConfig()


def ratio_and_weight(
    logprobs_M: Tensor, batch: SignalBatch, correction: CorrectionConfig
) -> tuple[Tensor, Tensor]:
    """The ratio (M,) that an objective is a function of, and the factor (M,) of its loss, without gradient.

    Without a correction: pi / mu, and 1. With one: pi / pi_old, and the bounded weight of pi_old / mu
    (decoupled PPO, arXiv:2110.00641).

    Raises:
        UsageError: see `sequence_log_ratios`.
    """
    if correction.kind is CorrectionKind.NONE:
        sampler_logprobs_M = required("sampler_logprobs_M", batch.sampler_logprobs_M)
        return log_ratio(logprobs_M, sampler_logprobs_M).exp(), torch.ones_like(logprobs_M)
    ratio_M = log_ratio(logprobs_M, trainer_logprobs(logprobs_M, batch)).exp()
    return ratio_M, correction_weights(logprobs_M, batch, correction)


def correction_weights(logprobs_M: Tensor, batch: SignalBatch, correction: CorrectionConfig) -> Tensor:
    """The weight (M,) of each token, without gradient.

    Truncated: TIS (Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training", 2025; Espeholt et al., arXiv:1802.01561). Masked: the weight within the bounds, else 0
    (IcePop, Ling team, 2025). At level `sequence` the weight is the product over a trajectory's trained
    tokens, the importance weight of the trajectory as a whole (Liu et al., "When speed kills
    stability", 2025); at level `geometric` it is that product to the power of 1 / tokens (GSPO,
    arXiv:2507.18071), which does not grow with length but is biased.

    Raises:
        UsageError: see `sequence_log_ratios`.
    """
    if correction.level is CorrectionLevel.TOKEN:
        weights_M = token_log_ratios(logprobs_M, batch).exp()
    else:
        weights_M = sequence_log_ratios(logprobs_M, batch, correction.level).exp()
    low, high = correction.bounds
    if correction.kind is CorrectionKind.TRUNCATE:
        return weights_M.clamp(low, high)
    return torch.where((weights_M >= low) & (weights_M <= high), weights_M, 0.0)


def trainer_logprobs(logprobs_M: Tensor, batch: SignalBatch) -> Tensor:
    """log pi_old (M,): as given, else those at hand without gradient: the update begins with this pass."""
    return logprobs_M.detach() if batch.old_logprobs_M is None else batch.old_logprobs_M


def token_log_ratios(logprobs_M: Tensor, batch: SignalBatch) -> Tensor:
    """log(pi_old / mu) of each token (M,), clamped, without gradient."""
    return log_ratio(
        trainer_logprobs(logprobs_M, batch), required("sampler_logprobs_M", batch.sampler_logprobs_M)
    )


def sequence_log_ratios(logprobs_M: Tensor, batch: SignalBatch, level: CorrectionLevel) -> Tensor:
    """log(pi_old / mu) of each token's trajectory (M,), clamped, without gradient.

    Raises:
        UsageError: a trajectory has rows in other micro-batches too, and no old logprobs were given.
    """
    index_M, tokens_M = sequences_of(batch)
    if batch.sequence_log_ratio_M is not None:
        sums_M = batch.sequence_log_ratio_M
    else:
        _require_whole(index_M, tokens_M, level)
        sampler_logprobs_M = required("sampler_logprobs_M", batch.sampler_logprobs_M)
        differences_M = trainer_logprobs(logprobs_M, batch) - sampler_logprobs_M
        # In float64 and on the host: a sum by index on a GPU takes its terms in any order.
        sums = np.bincount(index_M, differences_M.double().cpu().numpy())
        sums_M = torch.as_tensor(sums[index_M], dtype=logprobs_M.dtype, device=logprobs_M.device)
    if level is CorrectionLevel.GEOMETRIC:
        sums_M = sums_M / torch.as_tensor(tokens_M, dtype=sums_M.dtype, device=sums_M.device)
    return sums_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequences_of(batch: SignalBatch) -> tuple[np.ndarray, np.ndarray]:
    """Of each position: the index of its trajectory, and how many trained tokens that has in all rows."""
    if batch.sequence_M is None or batch.sequence_tokens_M is None:
        index_M = batch.row_M.cpu().numpy()
        return index_M, np.bincount(index_M)[index_M]
    return batch.sequence_M, batch.sequence_tokens_M


def _require_whole(index_M: np.ndarray, tokens_M: np.ndarray, level: CorrectionLevel) -> None:
    if (np.bincount(index_M)[index_M] != tokens_M).any():
        raise UsageError(
            f"objective.correction.level: {level} needs whole trajectories, and one has rows in several "
            "micro-batches; accepted: with old_logprobs (Trainer.forward of the same datums), or level token"
        )
