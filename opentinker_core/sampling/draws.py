"""Drawing tokens: of each running sequence one token a step, from its own generator.

Axes: B sequences, V vocabulary, C chunks of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from opentinker_core.sampling.distribution import SHAPE_FIELDS, is_truncated, log_distribution
from opentinker_core.sampling.protocol import (
    DrawnToken,
    PromptAnswer,
    SampledSequence,
    SampleRequest,
    SamplingParams,
)
from opentinker_core.trajectories.types import StopReason

_AHEAD = 64
"""Uniform numbers that are made at once."""
_CHUNK = 256
"""Tokens of a chunk: the one that is drawn is looked for by chunk first, then in it."""


class Draw:
    """One completion that is being drawn."""

    def __init__(self, request: SampleRequest, index: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Draw completion `index` of a request."""
        self.request = request
        self.index = index
        self.params = request.params
        self.shape = _Shape.of(request.params)
        self._tokenizer = tokenizer
        self.tokens: list[int] = []
        self.stop_reason: StopReason | None = None
        self._logprobs: list[float] = []
        self._model_logprobs: list[float] = []
        self._scaled_logprobs: list[float] = []
        self._top: list[tuple[list[int], list[float]]] = []
        self._told = 0
        self._uniform = np.empty(0)
        # Philox is counter-based: cheap to create, and the stream is fixed by numpy's policy.
        self._generator = np.random.Generator(np.random.Philox(request.seeds[index]))

    def uniform(self) -> float:
        """The number in [0, 1) that the next token is drawn with; it follows from seed and position."""
        at = len(self.tokens)
        if at >= len(self._uniform):
            self._uniform = np.concatenate([self._uniform, self._generator.random(_AHEAD)])
        return float(self._uniform[at])

    def take(
        self,
        token: int,
        logprob: float,
        model_logprob: float,
        scaled_logprob: float,
        top: tuple[list[int], list[float]] | None,
    ) -> None:
        """Append a drawn token."""
        self.tokens.append(token)
        self._logprobs.append(logprob)
        self._model_logprobs.append(model_logprob)
        self._scaled_logprobs.append(scaled_logprob)
        if top is not None:
            self._top.append(top)
        self.stop_reason = self._why_stopped()
        if self.request.listener is not None and len(self.tokens) > self._told:
            self._told += 1
            self.request.listener(self._last())

    def _last(self) -> DrawnToken:
        """The last token, with numbers as `sequence` will give them."""
        top: list[tuple[int, float]] = []
        if self.request.top_logprobs:
            tokens, logprobs = self._top[-1]
            top = list(zip(tokens, _rounded(logprobs), strict=True))
        logprob, model_logprob = _rounded([self._logprobs[-1], self._model_logprobs[-1]])
        at = len(self.tokens) - 1
        return DrawnToken(
            self.index, at, self.tokens[-1], logprob, model_logprob, tuple(top), self.stop_reason
        )

    def restart(self) -> None:
        """Forget what was drawn; the same will be drawn again."""
        self.tokens, self._logprobs, self._model_logprobs = [], [], []
        self._scaled_logprobs, self._top = [], []
        self.stop_reason = None

    def sequence(
        self, prompt_logprobs: np.ndarray | None, about_prompt: PromptAnswer | None
    ) -> SampledSequence:
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
            np.array(self._scaled_logprobs, np.float32) if self.request.scaled_logprobs else None,
            about_prompt,
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


def _rounded(values: list[float]) -> list[float]:
    """As float32."""
    return [float(value) for value in np.array(values, np.float32)]


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


_PLAIN = _Shape(1.0, 1.0, 0, 0.0)


def draw_tokens(logits_BV: Tensor, draws: Sequence[Draw]) -> list[Draw]:
    """Draw the next token of each sequence; gives those whose distribution is not finite, which got none."""
    groups: dict[_Shape, list[int]] = {}
    for index, draw in enumerate(draws):
        groups.setdefault(draw.shape, []).append(index)
    failed: list[Draw] = []
    for shape, own in groups.items():
        rows_BV = logits_BV if len(groups) == 1 else logits_BV[torch.as_tensor(own, device=logits_BV.device)]
        failed += _draw_alike(rows_BV.float(), shape, [draws[index] for index in own])
    return failed


def _draw_alike(logits_BV: Tensor, shape: _Shape, draws: Sequence[Draw]) -> list[Draw]:
    model = Weights.of(logits_BV)
    if shape.temperature == 0:
        tokens_B1 = logits_BV.argmax(-1, keepdim=True)
        logprobs_B = torch.zeros_like(model.total_B)
    else:
        shaped = model if shape == _PLAIN else Weights.of(_shaped(logits_BV, shape))
        tokens_B1 = shaped.pick([draw.uniform() for draw in draws]).clamp(max=logits_BV.shape[1] - 1)
        logprobs_B = shaped.logprobs(tokens_B1)
    model_B = model.logprobs(tokens_B1)
    scaled_B = model_B if shape.temperature in (0, 1) else logprobs_B
    asked = any(draw.request.scaled_logprobs for draw in draws)
    if asked and is_truncated(shape) and shape.temperature not in (0, 1):
        scaled_B = Weights.of(logits_BV / shape.temperature).logprobs(tokens_B1)
    columns = (tokens_B1[:, 0], logprobs_B, model_B, scaled_B)
    failed = []
    for draw, top, token, logprob, *others in zip(
        draws, _tops(model, draws), *(column.tolist() for column in columns), strict=True
    ):
        if math.isfinite(logprob):
            draw.take(token, logprob, *others, top)
        else:
            failed.append(draw)
    return failed


def _shaped(logits_BV: Tensor, shape: _Shape) -> Tensor:
    """Logits of the shaped distribution, up to a constant."""
    return log_distribution(logits_BV, shape) if is_truncated(shape) else logits_BV / shape.temperature


@dataclass(frozen=True, eq=False)
class Weights:
    """exp(logit - greatest), in chunks, with their sums: a distribution to draw from and to read off."""

    logits_BV: Tensor
    greatest_B1: Tensor
    chunks_BCV: Tensor
    cumulative_BC: Tensor
    """float64"""

    @classmethod
    def of(cls, logits_BV: Tensor) -> "Weights":
        greatest_B1 = logits_BV.amax(-1, keepdim=True)
        weights_BV = (logits_BV - greatest_B1).exp_()
        if extra := -weights_BV.shape[1] % _CHUNK:
            weights_BV = torch.nn.functional.pad(weights_BV, (0, extra))
        chunks_BCV = weights_BV.unflatten(1, (-1, _CHUNK))
        return cls(logits_BV, greatest_B1, chunks_BCV, chunks_BCV.sum(-1).double().cumsum(-1))

    @property
    def total_B(self) -> Tensor:
        return self.cumulative_BC[:, -1]

    def logprobs(self, tokens_BN: Tensor) -> Tensor:
        """float64 (B,), or (B, N) of several tokens a row."""
        shifted_BN = (self.logits_BV.gather(1, tokens_BN) - self.greatest_B1).double()
        return (shifted_BN - self.total_B.log()[:, None]).clamp(max=0.0).squeeze(1)

    def pick(self, uniform_B: Sequence[float]) -> Tensor:
        """The tokens (B, 1) at these shares of the total: inverse transform, in float64.

        Rounding cannot reach a token of weight zero: thresholds lie strictly below what is searched, and
        the searches are right-sided.
        """
        share_B = torch.tensor(uniform_B, dtype=torch.float64, device=self.total_B.device)
        threshold_B1 = (share_B * self.total_B)[:, None]
        chunk_B1 = _search(self.cumulative_BC, threshold_B1)
        before_B1 = self.cumulative_BC.gather(1, (chunk_B1 - 1).clamp(min=0)) * (chunk_B1 > 0)
        chunk_BV = self.chunks_BCV.gather(1, chunk_B1[:, :, None].expand(-1, -1, _CHUNK))[:, 0]
        inside_B1 = _search(chunk_BV.double().cumsum(-1), (threshold_B1 - before_B1).clamp(min=0.0))
        return chunk_B1 * _CHUNK + inside_B1


def _search(cumulative_BN: Tensor, threshold_B1: Tensor) -> Tensor:
    """Index (B, 1) of the first entry above the threshold; where rounding left none, the last that grew."""
    last_B1 = cumulative_BN.argmax(-1, keepdim=True)  # the first of the greatest: what follows adds nothing
    found_B1 = torch.searchsorted(cumulative_BN, threshold_B1, right=True)
    return torch.minimum(found_B1, last_B1)


def _tops(model: Weights, draws: Sequence[Draw]) -> list[tuple[list[int], list[float]] | None]:
    wanted = max(draw.request.top_logprobs for draw in draws)
    if wanted == 0:
        return [None] * len(draws)
    tokens_BK = model.logits_BV.topk(wanted, dim=-1).indices
    logprobs_BK = model.logprobs(tokens_BK).reshape(len(draws), wanted)
    return [
        (tokens[: draw.request.top_logprobs], values[: draw.request.top_logprobs])
        for draw, tokens, values in zip(draws, tokens_BK.tolist(), logprobs_BK.tolist(), strict=True)
    ]
