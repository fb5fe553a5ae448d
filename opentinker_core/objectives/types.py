"""What an objective takes and gives: SignalBatch, Metrics, Objective; how metrics combine.

Metrics are accumulators over the M positions of a micro-batch, so that those of several
micro-batches combine exactly: names ending in `_min` and `_max` by minimum and maximum, all others
by sum. `finalize_metrics` divides the sums by `tokens`, except `loss` and `tokens` themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opentinker_core.trajectories.packing import Batch

Metrics = dict[str, Tensor]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude before exp: e^20 is finite in every float type used."""


@dataclass(frozen=True)
class SignalBatch:
    """The learning signal of the M trained positions of a micro-batch; float tensors of shape (M,)."""

    token_scales_M: Tensor
    """The normalizer's factor of each position, computed over the global batch."""
    row_M: Tensor
    """int64: index of the datum of each position."""
    weights_M: Tensor | None = None
    advantages_M: Tensor | None = None
    sampler_logprobs_M: Tensor | None = None
    reference_logprobs_M: Tensor | None = None
    """Logprobs under the base model, where a KL penalty is asked for."""

    @classmethod
    def of(
        cls,
        batch: Batch,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        reference_logprobs_M: Tensor | None = None,
    ) -> "SignalBatch":
        """The positions of `batch` where the mask is true, in row-major order.

        Logprobs gathered by `batch.mask_BN` (as `logprobs_BN[mask_BN]`) have the same order.
        """
        mask_BN = batch.mask_BN

        def floats(values_BN: np.ndarray) -> Tensor:
            return torch.as_tensor(values_BN[mask_BN], dtype=dtype, device=device)

        signal_M = floats(batch.signal_BN)
        return cls(
            token_scales_M=floats(batch.token_scales_BN),
            row_M=torch.as_tensor(batch.datum_BN[mask_BN], device=device),
            weights_M=signal_M if batch.supervised else None,
            advantages_M=None if batch.supervised else signal_M,
            sampler_logprobs_M=None if batch.supervised else floats(batch.sampler_logprobs_BN),
            reference_logprobs_M=reference_logprobs_M,
        )


Objective = Callable[[Tensor, SignalBatch], tuple[Tensor, Metrics]]
"""`(logprobs_M, batch) -> (loss_sum, metrics)`; metrics carry no gradient."""


def combine_metrics(parts: Sequence[Metrics]) -> Metrics:
    """The metrics of all positions from those of disjoint parts (micro-batches)."""
    combined: Metrics = {}
    for part in parts:
        for name, value in part.items():
            combined[name] = _reduce(name, combined[name], value) if name in combined else value
    return combined


def finalize_metrics(metrics: Metrics) -> dict[str, float]:
    """Plain numbers: `loss` and `tokens` as they are, extremes, and means over tokens of the rest."""
    numbers = {name: float(value) for name, value in metrics.items()}
    tokens = numbers["tokens"]
    return {name: value if _kept(name) else value / tokens for name, value in numbers.items()}


def required(name: str, tensor: Tensor | None) -> Tensor:
    """The tensor, or a `ValueError` naming what the objective needs and was not given."""
    if tensor is None:
        raise ValueError(f"SignalBatch.{name}: needed by this objective, but not given")
    return tensor


def log_ratio(logprobs_M: Tensor, sampler_logprobs_M: Tensor) -> Tensor:
    """log(pi / mu) of each token, clamped to +-`MAX_LOG_RATIO` (no gradient beyond)."""
    return (logprobs_M - sampler_logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sampler_metrics(logprobs_M: Tensor, sampler_logprobs_M: Tensor, loss_sum: Tensor) -> Metrics:
    """Loss, tokens, the ratio before any clipping, and estimates of KL(mu || pi).

    The tokens are samples of mu, the sampler; with r = pi/mu, k1 = -log r and k3 = r - 1 - log r
    (Schulman, "Approximating KL divergence", 2020) both have the mean KL(mu || pi).
    """
    with torch.no_grad():
        ratio_M = log_ratio(logprobs_M, sampler_logprobs_M).exp()
        k1_M = sampler_logprobs_M - logprobs_M
        return {
            "loss": loss_sum.detach(),
            "tokens": torch.full_like(loss_sum, logprobs_M.numel()),
            "ratio_mean": ratio_M.sum(),
            "ratio_min": ratio_M.min(),
            "ratio_max": ratio_M.max(),
            "sampler_kl_k1": k1_M.sum(),
            "sampler_kl_k3": (ratio_M - 1 + k1_M).sum(),
        }


def _kept(name: str) -> bool:
    return name in ("loss", "tokens") or name.endswith(("_min", "_max"))


def _reduce(name: str, left: Tensor, right: Tensor) -> Tensor:
    if name.endswith("_min"):
        return torch.minimum(left, right)
    return torch.maximum(left, right) if name.endswith("_max") else left + right
