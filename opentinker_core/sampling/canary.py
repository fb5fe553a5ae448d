"""The canary: after a refresh, does the sampler serve what the trainer published?

Some tokens are sampled from the refreshed version, and from the base model in the same call; then the
trainer scores the very same tokens. Where both hold the same weights, their logprobs differ by rounding
only. A sampler need not be able to score given tokens for it.

In float32 the mean difference alone tells a wrong adapter: some 1e-6 to 1e-5 where all is well, 1e-2 where
one is missing, stale or another's. In bfloat16 rounding is as large as what one optimizer step changes, so
the differences are also compared with what the base model and the version before would have said
(`_looks_like`). What was measured, and what it cannot see: docs/samplers.md.

Axes: T scored tokens.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from opentinker_core.config.schema import CanaryConfig
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.sampling.protocol import BASE, SampledSequence, Sampler, SampleRequest, SamplingParams
from opentinker_core.trajectories.types import Datum

logger = logging.getLogger(__name__)

Score = Callable[[str, Sequence[Datum]], list[np.ndarray]]
"""The trainer's logprobs, (N,) a datum, under a version (the one it holds right now) or `BASE`."""

THRESHOLDS = {
    ("native", "float32"): 3e-5,
    ("native", "bfloat16"): 0.2,
    ("vllm", "float32"): 5e-5,
    ("vllm", "bfloat16"): 0.2,
}
"""Mean difference above which there is an alarm: several times what was measured where all is well."""

_AGREE = 1e-4
"""A mean difference so small that nothing else needs to be asked."""
_SEEDS = tuple(range(11, 19))
_BASE_PROMPTS = 3
"""Prompts that the base model is asked too. Tokens after one prompt share its rounding: one is too few."""


class CanaryError(OpenTinkerError):
    """Sampler and trainer disagree about a version by more than rounding."""


@dataclass(frozen=True)
class Gap:
    """How a probe was answered: the sampler's and the trainer's logprobs of the same tokens."""

    sampler_T: np.ndarray
    trainer_T: np.ndarray

    @property
    def mean(self) -> float:
        """Mean |difference|."""
        return float(np.abs(self.sampler_T - self.trainer_T).mean())

    @property
    def max(self) -> float:
        return float(np.abs(self.sampler_T - self.trainer_T).max())


@dataclass
class _Remembered:
    """What the trainer said of completions, one entry a (prompt, seed): tokens and their logprobs."""

    tokens: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)

    def of(self, tokens: Sequence[np.ndarray]) -> np.ndarray:
        """Its logprobs of the same tokens after the same context, float (T,); nan where it has none."""
        result: list[np.ndarray] = []
        for now, before, logprobs in zip(tokens, self.tokens, self.logprobs, strict=True):
            shorter = min(len(now), len(before))
            same = int(np.cumprod(now[:shorter] == before[:shorter]).sum())
            result.append(np.concatenate([logprobs[:same], np.full(len(now) - same, np.nan)]))
        return np.concatenate(result)


class Canary:
    """The check of one policy's versions, one after the other."""

    def __init__(
        self,
        config: CanaryConfig,
        sampler: Sampler,
        score: Score,
        tokenizer: PreTrainedTokenizerBase,
        *,
        kind: str = "native",
        dtype: str = "float32",
    ) -> None:
        """`kind` and `dtype` of the sampler give the threshold, where the config has none.

        Raises:
            UsageError: a prompt of the config has no tokens.
        """
        self._config, self._sampler, self._score = config, sampler, score
        self.threshold = config.threshold or THRESHOLDS.get((kind, dtype), THRESHOLDS["vllm", "bfloat16"])
        self._prompts = [_tokens(prompt, tokenizer) for prompt in config.prompts]
        self._before: _Remembered | None = None
        self._base = _Remembered()

    def check(self, version: str) -> dict[str, float]:
        """Compare sampler and trainer at `version`, which both were just given.

        Returns:
            `sampler/canary_mean` and `sampler/canary_max`: |difference of logprobs| over the version's
            rows and the base's, the larger of the two; `sampler/canary_alarm`, 1 if there was one.

        Raises:
            CanaryError: they differ by too much, and `canary.action` is `raise`.
        """
        asked = [_request(prompt, version) for prompt in self._prompts]
        asked += [_request(prompt, BASE) for prompt in self._prompts[:_BASE_PROMPTS]]
        answers = self._sampler.sample(asked)
        count = len(self._prompts)
        own = list(_completions(asked[:count], answers[:count]))
        base = list(_completions(asked[count:], answers[count:]))
        before, self._before = self._before, self._remember(version, own)
        if not _same_tokens(self._base, base):
            self._base = self._remember(BASE, base)
        gap, base_gap = _gap(own, self._before), _gap(base, self._base)
        fault = self._fault("its rows", gap, lambda: self._rivals(own, before))
        fault = fault or self._fault("rows of the base model", base_gap, lambda: self._adapted(version, base))
        if fault:
            self._alarm(version, fault)
        return {
            "sampler/canary_mean": max(gap.mean, base_gap.mean),
            "sampler/canary_max": max(gap.max, base_gap.max),
            "sampler/canary_alarm": float(fault is not None),
        }

    def _remember(self, version: str, completions: Sequence["_Completion"]) -> _Remembered:
        scored = self._score(version, [one.datum for one in completions])
        return _Remembered(
            [one.sequence.tokens for one in completions],
            [logprobs[one.datum.mask_N] for one, logprobs in zip(completions, scored, strict=True)],
        )

    def _fault(self, rows: str, gap: Gap, rivals: Callable[[], Iterator["_Rival"]]) -> str | None:
        """What is wrong with a kind of rows; the trainer is asked about rivals only if something may be."""
        if gap.mean <= min(_AGREE, self.threshold):
            return None
        likes = [like for rival in rivals() if (like := _looks_like(gap, rival, self.threshold))]
        cause = min(likes)[1] if likes else None
        if gap.mean <= self.threshold and cause is None:
            return None
        return (
            f"{rows}: logprobs differ by {gap.mean:.3g} in the mean, {gap.max:.3g} at most, over "
            f"{len(gap.sampler_T)} tokens; accepted: a mean of {self.threshold:.3g} (canary.threshold)"
        ) + (f"; they are nearer to those of {cause}" if cause else "")

    def _rivals(self, own: Sequence["_Completion"], before: _Remembered | None) -> Iterator["_Rival"]:
        """What could be served instead of the version: the version before (asked then), the base model."""
        tokens = [one.sequence.tokens for one in own]
        if before is not None:
            yield _Rival(before.of(tokens), "the version before")
        base_T = self._remember(BASE, own).of(tokens)
        yield _Rival(base_T, "the base model", beyond="the adapter at another scale")

    def _adapted(self, version: str, base: Sequence["_Completion"]) -> Iterator["_Rival"]:
        scored = self._remember(version, base)
        yield _Rival(scored.of(scored.tokens), "the version beside them")

    def _alarm(self, version: str, fault: str) -> None:
        message = f"canary: sampler and trainer disagree about {version}: {fault}"
        if self._config.action == "raise":
            raise CanaryError(message)
        logger.warning(message)


def _request(prompt: tuple[int, ...], version: str) -> SampleRequest:
    """One token for each of some seeds: they share the pass through the model, of which there is only one."""
    return SampleRequest(prompt, SamplingParams(max_tokens=1), version, _SEEDS)


@dataclass(frozen=True)
class _Completion:
    sequence: SampledSequence
    datum: Datum


def _completions(
    asked: Sequence[SampleRequest], answers: Sequence[Sequence[SampledSequence]]
) -> Iterator[_Completion]:
    """What was sampled, and the datum by which the trainer scores it."""
    for request, sequences in zip(asked, answers, strict=True):
        for sequence in sequences:
            tokens_T = np.concatenate([np.array(request.prompt_tokens, np.int64), sequence.tokens])
            mask_T = np.arange(len(tokens_T)) >= len(request.prompt_tokens)
            datum = Datum(tokens_T[:-1], tokens_T[1:], mask_T[1:], weights_N=mask_T[1:].astype(np.float32))
            yield _Completion(sequence, datum)


def _gap(completions: Sequence[_Completion], scored: _Remembered) -> Gap:
    return Gap(np.concatenate([c.sequence.logprobs for c in completions]), np.concatenate(scored.logprobs))


def _same_tokens(scored: _Remembered, completions: Sequence[_Completion]) -> bool:
    return len(scored.tokens) == len(completions) and all(
        np.array_equal(tokens, one.sequence.tokens)
        for tokens, one in zip(scored.tokens, completions, strict=True)
    )


@dataclass(frozen=True)
class _Rival:
    """What may be served by mistake: the trainer's logprobs of the same tokens, nan where not known."""

    logprobs_T: np.ndarray
    name: str
    beyond: str | None = None
    """What it is if the sampler is as far on the other side."""


def _looks_like(gap: Gap, rival: _Rival, threshold: float) -> tuple[float, str] | None:
    """How far the sampler is from a rival that it is nearer to than to the version, and the rival's name.

    With d = version - rival, both by the trainer, least squares of the sampler's logprobs on the line
    rival + x d gives x = 1 for the version and 0 for the rival; where the rival is the base, 2 for an
    adapter at twice its scale. Rounding of the size that the threshold allows for shifts x by threshold / |d|
    times the root of the number of tokens at the very worst, so x is asked only where |d| is large.
    """
    known_T = np.isfinite(rival.logprobs_T)
    towards_T = (gap.trainer_T - rival.logprobs_T)[known_T]
    off_T = (gap.sampler_T - gap.trainer_T)[known_T]
    length = float(np.linalg.norm(towards_T))
    if length <= 8 * threshold:
        return None
    x = 1 + float(off_T @ towards_T) / length**2
    if x < 0.5:
        return float(np.linalg.norm(off_T + towards_T)) / length, f"{rival.name} (x = {x:.2f}, right is 1)"
    if rival.beyond and x > 1.5:
        return float(np.linalg.norm(off_T - towards_T)) / length, f"{rival.beyond} (x = {x:.2f}, right is 1)"
    return None


def _tokens(prompt: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    tokens = tuple(tokenizer.encode(prompt, add_special_tokens=False))
    if not tokens:
        raise UsageError(f"canary.prompts: {prompt!r} has no tokens; accepted: texts with at least one")
    return tokens
