"""Drawing tokens: of each running sequence one token a step, from its own generator.

Axes: B sequences, V vocabulary, C chunks of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from opentinker_core.sampling.distribution import SHAPE_FIELDS, is_truncated, log_distribution
from opentinker_core.sampling.protocol import SampledSequence, SampleRequest, SamplingParams
from opentinker_core.trajectories.types import StopReason

_AHEAD = 64
"""Uniform numbers that are made at once."""
_CHUNK = 256
"""Tokens of a chunk: the one that is drawn is looked for by chunk first, then in it."""


class Draw:
    """One completion that is being drawn."""

    def __init__(self, request: SampleRequest, seed: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.request = request
        self.params = request.params
        self._tokenizer = tokenizer
        self._seed = seed
        self.tokens: list[int] = []
        self.stop_reason: StopReason | None = None
        self._logprobs: list[float] = []
        self._model_logprobs: list[float] = []
        self._top: list[tuple[list[int], list[float]]] = []
        self._uniform = np.empty(0)
        # Philox is counter-based: cheap to create, and the stream is fixed by numpy's policy.
        self._generator = np.random.Generator(np.random.Philox(seed))

    def uniform(self) -> float:
        """The number in [0, 1) that the next token is drawn with; it follows from seed and position."""
        at = len(self.tokens)
        if at >= len(self._uniform):
            self._uniform = np.concatenate([self._uniform, self._generator.random(_AHEAD)])
        return float(self._uniform[at])

    def take(
        self, token: int, logprob: float, model_logprob: float, top: tuple[list[int], list[float]] | None
    ) -> None:
        """Append a drawn token."""
        self.tokens.append(token)
        self._logprobs.append(logprob)
        self._model_logprobs.append(model_logprob)
        if top is not None:
            self._top.append(top)
        self.stop_reason = self._why_stopped()

    def restart(self) -> None:
        """Forget what was drawn; the same will be drawn again."""
        self.tokens, self._logprobs, self._model_logprobs, self._top = [], [], [], []
        self.stop_reason = None

    def sequence(self, prompt_logprobs: np.ndarray | None) -> SampledSequence:
        """The finished completion."""
        assert self.stop_reason is not None
        k = self.request.top_logprobs
        return SampledSequence(
            np.array(self.tokens, np.int32),
            np.array(self._logprobs, np.float32),
            self.stop_reason,
            self.request.version,
            np.array(self._model_logprobs, np.float32),
            prompt_logprobs,
            np.array([ids for ids, _ in self._top], np.int32).reshape(-1, k) if k else None,
            np.array([values for _, values in self._top], np.float32).reshape(-1, k) if k else None,
        )

    def _why_stopped(self) -> StopReason | None:
        if self.tokens[-1] in self.params.stop_token_ids:
            return StopReason.STOP
        if self.params.stop and self._text_has_stop():
            return StopReason.STOP
        return StopReason.LENGTH if len(self.tokens) == self.params.max_tokens else None

    def _text_has_stop(self) -> bool:
        """Whether the last token completed one of the stop strings: earlier ones would have stopped it."""
        assert self._tokenizer is not None
        tail = 4 * max(len(stop) for stop in self.params.stop) + 8  # a character is four tokens at most
        text = self._tokenizer.decode(self.tokens[-tail:], skip_special_tokens=True)
        return any(stop in text for stop in self.params.stop)


@dataclass(frozen=True)
class _Shape:
    """What draws must share to be made together."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float

    @classmethod
    def of(cls, params: SamplingParams) -> "_Shape":
        return cls(*(getattr(params, name) for name in SHAPE_FIELDS))


def draw_tokens(logits_BV: Tensor, draws: Sequence[Draw]) -> list[Draw]:
    """Draw the next token of each sequence; gives those whose distribution is not finite, which got none."""
    groups: dict[_Shape, list[int]] = {}
    for index, draw in enumerate(draws):
        groups.setdefault(_Shape.of(draw.params), []).append(index)
    failed: list[Draw] = []
    for shape, own in groups.items():
        rows_BV = logits_BV if len(groups) == 1 else logits_BV[torch.as_tensor(own, device=logits_BV.device)]
        failed += _draw_alike(rows_BV.float(), shape, [draws[index] for index in own])
    return failed


def _draw_alike(logits_BV: Tensor, shape: _Shape, draws: Sequence[Draw]) -> list[Draw]:
    greatest_B1, total_B = _normalizer(logits_BV)
    model_log_B = greatest_B1[:, 0].double() + total_B.log()
    if shape.temperature == 0:
        tokens_B = logits_BV.argmax(-1)
        logprobs_B, finite_B = torch.zeros_like(model_log_B), model_log_B.isfinite()
    else:
        tokens_B, logprobs_B, finite_B = _sample(logits_BV, shape, draws)
    picked_B = logits_BV.gather(1, tokens_B[:, None])[:, 0].double()
    tops = _tops(logits_BV, model_log_B, draws)
    columns = (tokens_B, logprobs_B, (picked_B - model_log_B).clamp(max=0.0), finite_B)
    failed = []
    for draw, top, token, logprob, model_logprob, finite in zip(
        draws, tops, *(column.tolist() for column in columns), strict=True
    ):
        if finite:
            draw.take(token, logprob, model_logprob, top)
        else:
            failed.append(draw)
    return failed


def _normalizer(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """(greatest logit (B, 1), sum of exp(logit - greatest) (B,) in float64)."""
    greatest_B1 = logits_BV.amax(-1, keepdim=True)
    return greatest_B1, (logits_BV - greatest_B1).exp_().sum(-1, dtype=torch.float64)


def _sample(logits_BV: Tensor, shape: _Shape, draws: Sequence[Draw]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (B,), their logprobs in the shaped distribution (B,), and which rows were finite (B,)."""
    if is_truncated(shape):
        shaped_BV = log_distribution(logits_BV, shape)
    else:
        shaped_BV = logits_BV if shape.temperature == 1.0 else logits_BV / shape.temperature
    greatest_B1 = shaped_BV.amax(-1, keepdim=True)
    weights_BV = (shaped_BV - greatest_B1).exp_()
    # Inverse transform in float64: rounding cannot reach a token of probability zero, because
    # thresholds lie strictly below the totals and the searches are right-sided.
    padded_BV = torch.nn.functional.pad(weights_BV, (0, -weights_BV.shape[1] % _CHUNK))
    chunks_BCV = padded_BV.unflatten(1, (-1, _CHUNK))
    cumulative_BC = chunks_BCV.sum(-1, dtype=torch.float64).cumsum(-1)
    total_B = cumulative_BC[:, -1]
    uniform_B = torch.tensor([draw.uniform() for draw in draws], dtype=torch.float64, device=total_B.device)
    threshold_B1 = (uniform_B * total_B)[:, None]
    chunk_B1 = _search(cumulative_BC, threshold_B1)
    before_B1 = torch.where(chunk_B1 > 0, cumulative_BC.gather(1, (chunk_B1 - 1).clamp(min=0)), 0.0)
    inside_BV = chunks_BCV.gather(1, chunk_B1[:, :, None].expand(-1, -1, _CHUNK))[:, 0].double().cumsum(-1)
    inside_B1 = _search(inside_BV, (threshold_B1 - before_B1).clamp(min=0.0))
    tokens_B1 = (chunk_B1 * _CHUNK + inside_B1).clamp(max=logits_BV.shape[1] - 1)
    logprobs_B = (shaped_BV.gather(1, tokens_B1) - greatest_B1)[:, 0].double() - total_B.log()
    return tokens_B1[:, 0], logprobs_B.clamp(max=0.0), total_B.isfinite()


def _search(cumulative_BN: Tensor, threshold_B1: Tensor) -> Tensor:
    """Index (B, 1) of the first entry above the threshold; where rounding left none, the last that grew."""
    last_B1 = cumulative_BN.argmax(-1, keepdim=True)  # the first of the greatest: what follows adds nothing
    found_B1 = torch.searchsorted(cumulative_BN, threshold_B1, right=True)
    return torch.minimum(found_B1, last_B1)


def _tops(
    logits_BV: Tensor, model_log_B: Tensor, draws: Sequence[Draw]
) -> list[tuple[list[int], list[float]] | None]:
    wanted = max(draw.request.top_logprobs for draw in draws)
    if wanted == 0:
        return [None] * len(draws)
    values_BK, tokens_BK = logits_BV.topk(wanted, dim=-1)
    logprobs_BK = (values_BK.double() - model_log_B[:, None]).clamp(max=0.0)
    return [
        (tokens[: draw.request.top_logprobs], values[: draw.request.top_logprobs])
        for draw, tokens, values in zip(draws, tokens_BK.tolist(), logprobs_BK.tolist(), strict=True)
    ]
