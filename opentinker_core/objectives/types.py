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

from opentinker_core.trajectories.errors import TrajectoryError
from opentinker_core.trajectories.packing import MicroBatch
from opentinker_core.trajectories.types import Datum

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
        batch: MicroBatch,
        datums: Sequence[Datum],
        token_scales: Sequence[np.ndarray],
        reference_logprobs: Sequence[np.ndarray] | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "SignalBatch":
        """The signal at the weighted positions of `batch`, in their order.

        Args:
            datums: the datums `batch` was made of.
            token_scales: of each datum, float (N,), from a normalizer over the global batch.
            reference_logprobs: of each datum, float (N,).

        Raises:
            TrajectoryError: weights and advantages are mixed, or an argument has not one (N,) array a datum.
        """
        _check_signal(datums, token_scales, reference_logprobs)

        def gathered(arrays: Sequence[np.ndarray]) -> Tensor:
            return torch.as_tensor(batch.gather(arrays), dtype=dtype, device=device)

        def optional(arrays: Sequence[np.ndarray | None]) -> Tensor | None:
            given = [array for array in arrays if array is not None]
            return gathered(given) if len(given) == len(arrays) else None

        return cls(
            token_scales_M=gathered(token_scales),
            row_M=torch.as_tensor(batch.datum_M, device=device),
            weights_M=optional([datum.weights_N for datum in datums]),
            advantages_M=optional([datum.advantages_N for datum in datums]),
            sampler_logprobs_M=optional([datum.sampler_logprobs_N for datum in datums]),
            reference_logprobs_M=None if reference_logprobs is None else gathered(reference_logprobs),
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


def _check_signal(
    datums: Sequence[Datum],
    token_scales: Sequence[np.ndarray],
    reference_logprobs: Sequence[np.ndarray] | None,
) -> None:
    if len({datum.weights_N is None for datum in datums}) > 1:
        raise TrajectoryError("datums", "weights and advantages mixed", "one kind of signal a batch")
    for name, arrays in (("token_scales", token_scales), ("reference_logprobs", reference_logprobs)):
        if arrays is not None and [len(array) for array in arrays] != [len(datum) for datum in datums]:
            raise TrajectoryError(name, [len(array) for array in arrays], "one (N,) array a datum")


def _kept(name: str) -> bool:
    return name in ("loss", "tokens") or name.endswith(("_min", "_max"))


def _reduce(name: str, left: Tensor, right: Tensor) -> Tensor:
    if name.endswith("_min"):
        return torch.minimum(left, right)
    return torch.maximum(left, right) if name.endswith("_max") else left + right
