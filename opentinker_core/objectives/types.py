"""What an objective takes and gives: SignalBatch, Metrics, Objective; how metrics combine.

Metrics are accumulators over the M positions of a micro-batch, so that those of several
micro-batches combine exactly: names ending in `_min` and `_max` by minimum and maximum, all others
by sum. `finalize_metrics` divides the sums by `tokens`, those whose names begin with `sequence_` by
`sequences`, and turns the mean square of a weight (`..._square`) into its effective sample size (`..._ess`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opentinker_core.objectives.normalizers import trajectory_names
from opentinker_core.trajectories.client_datum import ClientDatum
from opentinker_core.trajectories.errors import TrajectoryError
from opentinker_core.trajectories.packing import MicroBatch
from opentinker_core.trajectories.types import Datum

Metrics = dict[str, Tensor]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude before exp: e^20 is finite in every float type used."""


@dataclass(frozen=True)
class SignalBatch:
    """The learning signal of the M trained positions of a micro-batch; float tensors of shape (M,).

    Of datums with several targets a position: (M, K), 0 where a position has fewer.
    """

    token_scales_M: Tensor
    """The normalizer's factor of each position, computed over the global batch."""
    row_M: Tensor
    """int64: index of the datum of each position."""
    weights_M: Tensor | None = None
    advantages_M: Tensor | None = None
    sampler_logprobs_M: Tensor | None = None
    reference_logprobs_M: Tensor | None = None
    """Logprobs under the reference policy, where a KL penalty is asked for."""
    old_logprobs_M: Tensor | None = None
    """Logprobs of the policy when the update on these datums began; None: it begins with this pass."""
    sequence_M: np.ndarray | None = None
    """int64 (M,): index of the trajectory of each position; None: each datum is one."""
    sequence_tokens_M: np.ndarray | None = None
    """int64 (M,): how many trained tokens that trajectory has, in all micro-batches together."""
    sequence_log_ratio_M: Tensor | None = None
    """log(pi_old / mu) of that trajectory, summed over these tokens; given where old logprobs are."""
    ratio_low_M: Tensor | None = None
    """Bounds of each token's ratio, where a client gave them (see `ClientDatum`)."""
    ratio_high_M: Tensor | None = None
    sequence_mask_M: Tensor | None = None
    """How much each token counts in the ratio of its sequence, where a client said so."""

    @classmethod
    def of(
        cls,
        batch: MicroBatch,
        datums: Sequence[Datum],
        token_scales: Sequence[np.ndarray],
        reference_logprobs: Sequence[np.ndarray] | None = None,
        old_logprobs: Sequence[np.ndarray] | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "SignalBatch":
        """The signal at the weighted positions of `batch`, in their order.

        Args:
            datums: the datums `batch` was made of.
            token_scales: of each datum, float in the shape of its targets, from a normalizer over the global
                batch.
            reference_logprobs: of each datum, likewise.
            old_logprobs: likewise, of the policy when the update on these datums began.

        Raises:
            TrajectoryError: weights and advantages are mixed, or an argument has not one (N,) array a datum.
        """
        _check_signal(
            datums,
            token_scales=token_scales,
            reference_logprobs=reference_logprobs,
            old_logprobs=old_logprobs,
        )

        def gathered(arrays: Sequence[np.ndarray]) -> Tensor:
            return torch.as_tensor(batch.gather(arrays), dtype=dtype, device=device)

        def optional(arrays: Sequence[np.ndarray | None]) -> Tensor | None:
            given = [array for array in arrays if array is not None]
            return gathered(given) if len(given) == len(arrays) else None

        sequence_D, tokens_D = _sequences(datums)
        ratio_M: Tensor | None = None
        if old_logprobs is not None:
            ratio_D = _log_ratios(datums, old_logprobs, sequence_D)
            ratio_M = torch.as_tensor(ratio_D[batch.datum_M], dtype=dtype, device=device)
        return cls(
            token_scales_M=gathered(token_scales),
            row_M=torch.as_tensor(batch.datum_M, device=device),
            weights_M=optional([datum.weights_N for datum in datums]),
            advantages_M=optional([datum.advantages_N for datum in datums]),
            sampler_logprobs_M=optional([datum.sampler_logprobs_N for datum in datums]),
            reference_logprobs_M=None if reference_logprobs is None else gathered(reference_logprobs),
            old_logprobs_M=None if old_logprobs is None else gathered(old_logprobs),
            sequence_M=sequence_D[batch.datum_M],
            sequence_tokens_M=tokens_D[batch.datum_M],
            sequence_log_ratio_M=ratio_M,
            ratio_low_M=optional([_of_client(datum, "ratio_low_N") for datum in datums]),
            ratio_high_M=optional([_of_client(datum, "ratio_high_N") for datum in datums]),
            sequence_mask_M=optional([_of_client(datum, "sequence_mask_N") for datum in datums]),
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
    """Plain numbers: `loss` and the counts as they are, extremes, means of the rest, and sample sizes."""
    totals = {name: float(value) for name, value in metrics.items()}
    numbers: dict[str, float] = {}
    for name, value in totals.items():
        count = totals["sequences" if name.startswith("sequence_") else "tokens"]
        if name.endswith("_square"):
            stem = name.removesuffix("_square")
            numbers[f"{stem}_ess"] = totals[f"{stem}_mean"] ** 2 / (count * value) if value else 0.0
        else:
            numbers[name] = value if _kept(name) else value / count
    return numbers


def required(name: str, tensor: Tensor | None) -> Tensor:
    """The tensor, or a `ValueError` naming what the objective needs and was not given."""
    if tensor is None:
        raise ValueError(f"SignalBatch.{name}: needed by this objective, but not given")
    return tensor


def log_ratio(logprobs_M: Tensor, sampler_logprobs_M: Tensor) -> Tensor:
    """log(pi / mu) of each token, clamped to +-`MAX_LOG_RATIO` (no gradient beyond)."""
    return (logprobs_M - sampler_logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _of_client(datum: Datum, name: str) -> np.ndarray | None:
    array: np.ndarray | None = getattr(datum, name) if isinstance(datum, ClientDatum) else None
    return array


def _check_signal(datums: Sequence[Datum], **given: Sequence[np.ndarray] | None) -> None:
    if len({datum.weights_N is None for datum in datums}) > 1:
        raise TrajectoryError("datums", "weights and advantages mixed", "one kind of signal a batch")
    for name, arrays in given.items():
        if arrays is not None and [len(array) for array in arrays] != [len(datum) for datum in datums]:
            raise TrajectoryError(name, [len(array) for array in arrays], "one (N,) array a datum")


def _sequences(datums: Sequence[Datum]) -> tuple[np.ndarray, np.ndarray]:
    """Of each datum: the index of its trajectory, and how many trained tokens that has."""
    names = trajectory_names(datums)
    index = {name: place for place, name in enumerate(dict.fromkeys(names))}
    sequence_D = np.array([index[name] for name in names], np.int64)
    own_D = np.array([np.count_nonzero(datum.mask_N) for datum in datums])
    return sequence_D, np.bincount(sequence_D, own_D).astype(np.int64)[sequence_D]


def _log_ratios(
    datums: Sequence[Datum], old_logprobs: Sequence[np.ndarray], sequence_D: np.ndarray
) -> np.ndarray:
    """Of each datum: log(pi_old / mu) of its trajectory, float64."""
    sums_D: list[float] = []
    for index, (datum, old_N) in enumerate(zip(datums, old_logprobs, strict=True)):
        if datum.sampler_logprobs_N is None:
            raise TrajectoryError(
                f"datums[{index}].sampler_logprobs_N",
                None,
                "the sampler's logprobs, to compare the old ones with",
            )
        sums_D.append(float((old_N.astype(np.float64) - datum.sampler_logprobs_N)[datum.mask_N].sum()))
    return np.bincount(sequence_D, sums_D)[sequence_D]


def _kept(name: str) -> bool:
    return name in ("loss", "tokens", "sequences") or name.endswith(("_min", "_max"))


def _reduce(name: str, left: Tensor, right: Tensor) -> Tensor:
    if name.endswith("_min"):
        return torch.minimum(left, right)
    return torch.maximum(left, right) if name.endswith("_max") else left + right
