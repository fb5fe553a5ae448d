"""The public losses: a client's data, loss name and config as what the trainer is asked for, and back.

Every loss is a plain sum over tokens and datums, without a normalizer.

Axes: N positions of a datum, K targets a position.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from opentinker_core.errors import UsageError
from opentinker_core.objectives.cispo import cispo
from opentinker_core.objectives.cross_entropy import cross_entropy
from opentinker_core.objectives.dro import dro
from opentinker_core.objectives.gspo import gspo
from opentinker_core.objectives.importance_sampling import importance_sampling
from opentinker_core.objectives.ppo import ppo
from opentinker_core.objectives.types import Objective, SignalBatch, finalize_metrics
from opentinker_core.service.tinker.wire_types import WireDatum
from opentinker_core.training.trainer import ForwardBackward, PolicyBatch
from opentinker_core.trajectories.client_datum import ClientDatum
from opentinker_core.trajectories.packing import trained_positions

_BOUNDS = ("clip_low_threshold", "clip_high_threshold")


@dataclass(frozen=True)
class _Loss:
    """What a loss takes, besides `target_tokens`."""

    objective: Callable[..., object]
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    config: Mapping[str, float] = field(default_factory=dict)
    """Names and defaults."""

    @property
    def clips(self) -> bool:
        return _BOUNDS[0] in self.config

    @property
    def optional(self) -> tuple[str, ...]:
        """Inputs that may be given: bounds of single tokens."""
        return _BOUNDS if self.clips else ()


def _clip(low: float, high: float) -> dict[str, float]:
    return dict(zip(_BOUNDS, (low, high), strict=True))


_LOSSES = {
    "cross_entropy": _Loss(cross_entropy, ("weights",)),
    "importance_sampling": _Loss(importance_sampling),
    "ppo": _Loss(ppo, config=_clip(0.8, 1.2)),
    "cispo": _Loss(cispo, config=_clip(0.0, 4.0)),
    "dro": _Loss(dro, config={"beta": 0.05}),
    "gspo": _Loss(gspo, ("logprobs", "advantages", "sequence_ratio_mask"), _clip(0.8, 1.2)),
}

LOSSES = tuple(_LOSSES)
"""The names that are accepted."""


def policy_batch(
    policy: str,
    data: Sequence[WireDatum],
    loss_fn: str,
    config: Mapping[str, float | str],
    *,
    vocabulary: int,
    max_length: int,
) -> PolicyBatch:
    """What the trainer is asked for, by `forward_backward_all`, or `forward` of its datums.

    Args:
        vocabulary: tokens of the base model (rows of its embedding).
        max_length: tokens of a datum at most (the model's context).

    Raises:
        UsageError: the loss is unknown or not supported, or its inputs or config are not what it takes.
    """
    loss = _LOSSES.get(loss_fn)
    if loss is None:
        raise UsageError(f"loss_fn: {loss_fn!r:.60} is not accepted; accepted: {', '.join(LOSSES)}")
    settings = _settings(loss_fn, loss, config)
    if not data:
        raise UsageError("data: [] is not accepted; accepted: at least one datum")
    datums = []
    for index, wire in enumerate(data):
        name = f"data[{index}]"
        _check_tokens(f"{name}.model_input", wire.tokens_N, vocabulary, max_length)
        datums.append(_datum(name, wire, loss_fn, loss, settings, vocabulary))
    scales = [np.ones(datum.target_tokens_N.shape, np.float32) for datum in datums]
    return PolicyBatch(policy, datums, _objective(loss, settings), scales)


def forward_result(batch: PolicyBatch, logprobs: Sequence[np.ndarray]) -> ForwardBackward:
    """What `forward_backward` would have reported, from what `forward` of the batch's datums gave."""
    everything = trained_positions(batch.datums)
    with torch.no_grad():
        signal = SignalBatch.of(everything, batch.datums, batch.scales)
        loss, metrics = batch.objective(torch.from_numpy(everything.gather(logprobs)), signal)
    return ForwardBackward(loss.item(), finalize_metrics(metrics), list(logprobs))


def output(result: ForwardBackward) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
    """The arguments of `wire.write_forward_backward`: `logprobs` of each datum, and `loss:sum`."""
    return [{"logprobs": logprobs} for logprobs in result.logprobs], {"loss:sum": result.loss}


def _objective(loss: _Loss, settings: Mapping[str, float]) -> Objective:
    # Clipping losses find their bounds in the datums, where they may differ by token.
    arguments = {} if loss.clips else settings
    return partial(loss.objective, **arguments)  # type: ignore[return-value]


def _settings(loss_fn: str, loss: _Loss, config: Mapping[str, float | str]) -> dict[str, float]:
    settings = dict(loss.config)
    for name, value in config.items():
        if name not in loss.config:
            accepted = ", ".join(loss.config) or "none"
            raise UsageError(
                f"loss_fn_config: {name!r:.60} is not accepted; accepted by {loss_fn}: {accepted}"
            )
        if isinstance(value, str) or math.isnan(value) or value < 0:
            raise UsageError(
                f"loss_fn_config.{name}: {value!r:.60} is not accepted; accepted: a number, at least 0"
            )
        if math.isinf(value) and name != _BOUNDS[1]:
            raise UsageError(f"loss_fn_config.{name}: {value} is not accepted; accepted: a finite number")
        settings[name] = float(value)
    if loss.clips and settings[_BOUNDS[0]] > settings[_BOUNDS[1]]:
        raise UsageError(
            f"loss_fn_config.{_BOUNDS[0]}: {settings[_BOUNDS[0]]} is not accepted; "
            f"accepted: at most {_BOUNDS[1]} ({settings[_BOUNDS[1]]})"
        )
    return settings


def _datum(
    name: str, wire: WireDatum, loss_fn: str, loss: _Loss, settings: Mapping[str, float], vocabulary: int
) -> ClientDatum:
    names = ("target_tokens", *loss.inputs)
    if missing := [one for one in names if one not in wire.inputs]:
        raise UsageError(
            f"{name}.loss_fn_inputs: {missing[0]} is missing; {loss_fn} takes {', '.join(names)}"
        )
    for given in wire.inputs:
        if given not in (*names, *loss.optional):
            raise UsageError(
                f"{name}.loss_fn_inputs: {given!r:.60} is not accepted; "
                f"accepted by {loss_fn}: {', '.join((*names, *loss.optional))}"
            )
    inputs = f"{name}.loss_fn_inputs"
    targets = _targets(f"{inputs}.target_tokens", wire, loss_fn, vocabulary)
    arrays = {
        one: _floats(f"{inputs}.{one}", array, targets.shape)
        for one, array in wire.inputs.items()
        if one != "target_tokens"
    }
    bounds = _bounds(inputs, arrays, settings, len(targets)) if loss.clips else (None, None)
    _check_finite(inputs, arrays)
    return ClientDatum(
        wire.tokens_N,
        targets,
        np.ones(len(targets), bool),
        weights_N=arrays.get("weights"),
        advantages_N=arrays.get("advantages"),
        sampler_logprobs_N=_sampler_logprobs(inputs, arrays, loss_fn),
        ratio_low_N=bounds[0],
        ratio_high_N=bounds[1],
        sequence_mask_N=arrays.get("sequence_ratio_mask"),
    )


def _targets(name: str, wire: WireDatum, loss_fn: str, vocabulary: int) -> np.ndarray:
    targets, length = wire.inputs["target_tokens"], len(wire.tokens_N)
    if targets.dtype != np.int64:
        raise UsageError(f"{name}: {targets.dtype} is not accepted; accepted: int64")
    several = loss_fn == "cross_entropy" and targets.ndim == 2 and targets.shape[1] > 0
    if len(targets) != length or not (targets.ndim == 1 or several):
        accepted = f"[{length}]" + (f" or [{length}, K]" if loss_fn == "cross_entropy" else "")
        raise UsageError(
            f"{name}: shape {list(targets.shape)} is not accepted; "
            f"accepted: {accepted}, a target for each token of the model input"
        )
    _check_vocabulary(name, targets, vocabulary)
    return targets


def _floats(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.shape != shape:
        raise UsageError(
            f"{name}: shape {list(array.shape)} is not accepted; accepted: {list(shape)} as target_tokens"
        )
    return array.astype(np.float32)


def _bounds(
    name: str, arrays: Mapping[str, np.ndarray], settings: Mapping[str, float], length: int
) -> tuple[np.ndarray, np.ndarray]:
    low_N, high_N = (
        arrays[one] if one in arrays else np.full(length, settings[one], np.float32) for one in _BOUNDS
    )
    wrong_N = ~((low_N >= 0) & (low_N <= high_N) & np.isfinite(low_N))
    if wrong_N.any():
        at = int(np.argmax(wrong_N))
        raise UsageError(
            f"{name}: clip thresholds {low_N[at]} and {high_N[at]} at position {at} are not accepted; "
            "accepted: 0 <= low <= high"
        )
    return low_N, high_N


def _check_finite(name: str, arrays: Mapping[str, np.ndarray]) -> None:
    for one in ("weights", "advantages", "sequence_ratio_mask"):
        if one in arrays and not np.isfinite(arrays[one]).all():
            bad = arrays[one][~np.isfinite(arrays[one])][0]
            raise UsageError(f"{name}.{one}: {bad} is not accepted; accepted: finite numbers")
    mask = arrays.get("sequence_ratio_mask")
    if mask is not None and (mask < 0).any():
        raise UsageError(f"{name}.sequence_ratio_mask: {mask.min()} is not accepted; accepted: at least 0")


def _sampler_logprobs(name: str, arrays: Mapping[str, np.ndarray], loss_fn: str) -> np.ndarray | None:
    """What was given, 0 where it is not finite and not looked at."""
    logprobs_N = arrays.get("logprobs")
    if logprobs_N is None:
        return None
    used_N = arrays["advantages"] != 0
    if loss_fn == "dro":  # its penalty holds everywhere
        used_N = np.ones_like(used_N)
    if (mask_N := arrays.get("sequence_ratio_mask")) is not None:
        used_N = used_N | (mask_N != 0)
    finite_N = np.isfinite(logprobs_N)
    if (used_N & ~finite_N).any():
        at = int(np.argmax(used_N & ~finite_N))
        raise UsageError(
            f"{name}.logprobs[{at}]: {logprobs_N[at]} is not accepted; "
            "accepted: finite numbers wherever the loss looks"
        )
    return np.where(finite_N, logprobs_N, np.float32(0))


def _check_tokens(name: str, tokens_N: np.ndarray, vocabulary: int, max_length: int) -> None:
    if not 1 <= len(tokens_N) <= max_length:
        raise UsageError(f"{name}: {len(tokens_N)} tokens are not accepted; accepted: 1 to {max_length}")
    _check_vocabulary(name, tokens_N, vocabulary)


def _check_vocabulary(name: str, tokens: np.ndarray, vocabulary: int) -> None:
    wrong = (tokens < 0) | (tokens >= vocabulary)
    if wrong.any():
        raise UsageError(
            f"{name}: token {tokens[wrong][0]} is not accepted; "
            f"accepted: 0 to {vocabulary - 1}, the vocabulary"
        )
