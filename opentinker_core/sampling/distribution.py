"""The distribution tokens are drawn from, in one place for sampler and trainer.

Axes: M positions, V vocabulary.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

_NEGATIVE_INFINITY = float("-inf")


class Truncation(Protocol):
    """What shapes a distribution: fields of `SamplingParams` and of `Datum`."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...


SHAPE_FIELDS = ("temperature", "top_p", "top_k", "min_p")
"""The fields of `Truncation`."""


def is_truncated(shape: Truncation) -> bool:
    """Whether some tokens are dropped."""
    return shape.top_k > 0 or shape.top_p < 1.0 or shape.min_p > 0.0


def log_distribution(logits_MV: Tensor, shape: Truncation, keep_M: Tensor | None = None) -> Tensor:
    """Log-probabilities (M, V), float32, of the distribution at `shape` (temperature > 0).

    Temperature first, then min-p (Nguyen et al., arXiv:2407.01082), then top-k, then top-p on what is
    left (nucleus sampling, Holtzman et al., arXiv:1904.09751), renormalized. `keep_M` names a token a
    row that stays in the support whatever its rank: the trainer keeps the token that was sampled, so
    that its logprob stays finite when an update moves it out of the nucleus; where it is inside, nothing
    changes.
    """
    logits_MV = logits_MV.float()
    if shape.temperature != 1.0:
        logits_MV = logits_MV / shape.temperature
    if is_truncated(shape):
        dropped_MV = ~support(logits_MV.detach(), shape.top_k, shape.top_p, shape.min_p)
        if keep_M is not None:
            dropped_MV.scatter_(1, keep_M[:, None], False)
        logits_MV = logits_MV.masked_fill(dropped_MV, _NEGATIVE_INFINITY)
    return torch.log_softmax(logits_MV, dim=-1)


def support(logits_MV: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Bool (M, V): tokens that survive min-p, then top-k, then top-p. The most likely token always does."""
    likely_MV = None
    if min_p > 0.0:
        likely_MV = logits_MV >= logits_MV.amax(-1, keepdim=True) + math.log(min_p)
        if top_k == 0 and top_p == 1.0:
            return likely_MV
        logits_MV = logits_MV.masked_fill(~likely_MV, _NEGATIVE_INFINITY)
    order_MV = torch.argsort(logits_MV, dim=-1, descending=True, stable=True)
    sorted_MV = logits_MV.gather(1, order_MV)
    kept_MV = torch.ones_like(sorted_MV, dtype=torch.bool)
    if top_k > 0:
        kept_MV[:, top_k:] = False
    if top_p < 1.0:
        probs_MV = torch.softmax(sorted_MV.masked_fill(~kept_MV, _NEGATIVE_INFINITY), dim=-1)
        before_MV = probs_MV.cumsum(-1) - probs_MV
        kept_MV &= before_MV < top_p
    kept_MV[:, 0] = True
    kept_MV = torch.zeros_like(kept_MV).scatter_(1, order_MV, kept_MV)
    return kept_MV if likely_MV is None else kept_MV & likely_MV
