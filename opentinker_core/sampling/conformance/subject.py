"""The sampler under test, and what the checks of it are made of."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from opentinker_core.errors import UsageError
from opentinker_core.sampling.protocol import SampledSequence, Sampler, SampleRequest, SamplingParams
from opentinker_core.trajectories.types import Datum

_REQUESTS = ("prompt_logprobs", "top_logprobs", "scaled_logprobs", "about_prompt")
OPTIONAL = frozenset(("stop", "top_k", "top_p", "min_p", *_REQUESTS))
"""Fields that a sampler may refuse, with a `UsageError` that names them."""

LENGTH = 5
"""Tokens of a completion where nothing else is said: the one after the prompt, and some after one another."""

Completions = list[SampledSequence]
Score = Callable[[str, Sequence[Datum]], list[np.ndarray]]
"""The true logprobs (N,) of each datum's targets, 0 where its mask is false, under a version or `BASE`."""


class ConformanceError(AssertionError):
    """The sampler does not do what `Sampler` promises."""


class NotOfferedError(Exception):
    """A check cannot be made: the sampler declares that it lacks a field of `OPTIONAL`, or nothing to check
    it with was given."""


@dataclass(frozen=True)
class Published:
    """A version and its sampler snapshot."""

    version: str
    uri: str
    digest: str


@dataclass(frozen=True)
class Subject:
    """The sampler under test, and what it is tested with.

    Raises:
        ValueError: there are not enough versions or prompts to check with.
    """

    sampler: Sampler
    versions: tuple[Published, ...]
    """At least two, of adapters that change what is sampled, and differ."""
    prompts: tuple[tuple[int, ...], ...]
    """At least two, of different lengths, after which the model is not certain of the next token."""
    broken: tuple[Published, ...] = ()
    """Snapshots that cannot be served: missing, corrupt."""
    decode: Callable[[Sequence[int]], str] | None = None
    """The text of token ids; None: stop strings are not checked."""
    score: Score | None = None
    """The reference for logprobs; None: they are not compared."""
    context: int | None = None
    """Tokens that prompt and completion may have together; None: its limit is not checked."""
    tolerance: float = 1e-4
    """Largest difference of logprobs from the reference."""
    rounding: float = 0.0
    """Largest difference of a request's logprobs in other company. 0: not a bit, and no token. Above:
    one completion of fifty may also part ways, since two tokens can be as good as equally likely."""

    def __post_init__(self) -> None:
        lengths = sorted({len(prompt) for prompt in self.prompts})
        if len(self.versions) < 2 or len(lengths) < 2:
            raise ValueError(
                f"Subject: {len(self.versions)} versions, prompts of lengths {lengths}; "
                "accepted: two versions or more, and prompts of two lengths or more"
            )


def serve(subject: Subject) -> tuple[str, ...]:
    """Refresh the sampler with all versions; their names."""
    for published in subject.versions:
        refresh(subject, published)
    return tuple(published.version for published in subject.versions)


def refresh(subject: Subject, published: Published) -> None:
    """Refresh the sampler with one version."""
    subject.sampler.refresh(published.version, published.uri, published.digest)


def answer(subject: Subject, requests: Sequence[SampleRequest]) -> list[Completions]:
    """The sampler's answers, a completion a seed, to requests that it may not refuse."""
    try:
        return _answer(subject, requests)
    except UsageError as error:
        raise ConformanceError(f"broken promise: this can be sampled, but is refused: {error}") from error


def sample(
    subject: Subject,
    version: str,
    prompt: tuple[int, ...] | None = None,
    *,
    seeds: tuple[int, ...] = (1, 2, 3),
    **options: Any,
) -> Completions:
    """Completions of one request; options are fields of its params (else `LENGTH` tokens), or its own."""
    return answer(subject, [_request(subject, version, prompt, seeds, options)])[0]


def sample_each(
    subject: Subject, versions: Sequence[str], *, seeds: tuple[int, ...] = (1, 2, 3), **options: Any
) -> dict[str, Completions]:
    """`sample` of each version, asked for together, by version."""
    requests = [_request(subject, version, None, seeds, options) for version in versions]
    return dict(zip(versions, answer(subject, requests), strict=True))


def offered(
    subject: Subject,
    version: str,
    prompt: tuple[int, ...] | None = None,
    *,
    seeds: tuple[int, ...] = (1, 2, 3),
    **options: Any,
) -> Completions | None:
    """`sample`; None if the sampler refuses one of the options, which is optional, by name."""
    try:
        return _answer(subject, [_request(subject, version, prompt, seeds, options)])[0]
    except UsageError as error:
        if any(re.search(rf"\b{name}\b", str(error)) for name in OPTIONAL & options.keys()):
            return None
        raise ConformanceError(f"broken promise: this can be sampled, but is refused: {error}") from error


def _request(
    subject: Subject,
    version: str,
    prompt: tuple[int, ...] | None,
    seeds: tuple[int, ...],
    options: dict[str, Any],
) -> SampleRequest:
    own = {name: value for name, value in options.items() if name in _REQUESTS}
    params = {"max_tokens": LENGTH} | {name: value for name, value in options.items() if name not in own}
    return SampleRequest(prompt or subject.prompts[0], SamplingParams(**params), version, seeds, **own)


def _answer(subject: Subject, requests: Sequence[SampleRequest]) -> list[Completions]:
    answers = subject.sampler.sample(requests)
    require(len(answers) == len(requests), "there is an answer a request")
    for request, completions in zip(requests, answers, strict=True):
        require(len(completions) == len(request.seeds), "there is a completion a seed")
    return answers


def datum(prompt: tuple[int, ...], tokens: Sequence[int], shape: dict[str, Any]) -> Datum:
    """What a reference scores: a completion, sampled at `shape`; without one, the prompt after its first."""
    row = np.array([*prompt, *tokens], np.int64)
    mask = np.arange(1, len(row)) >= (len(prompt) if len(tokens) else 1)
    return Datum(row[:-1], row[1:], mask, weights_N=mask.astype(np.float32), **shape)


def cut(one: SampledSequence, tokens: int) -> SampledSequence:
    """The beginning of a completion."""
    return replace(one, tokens=one.tokens[:tokens], logprobs=one.logprobs[:tokens])


def require(holds: bool, promise: str) -> None:
    """Raise `ConformanceError` unless the promise holds."""
    if not holds:
        raise ConformanceError(f"broken promise: {promise}")


def near(given: np.ndarray, expected: np.ndarray, tolerance: float, promise: str) -> None:
    """Require arrays of one shape that differ by `tolerance` at most."""
    require(given.shape == expected.shape, f"{promise} (their shapes are {given.shape} and {expected.shape})")
    gap = float(np.abs(given - expected).max(initial=0))
    require(gap <= tolerance, f"{promise} (they differ by {gap:.3g}; accepted: {tolerance:.3g})")


def refused(
    kind: type[Exception], named: str, what: str, action: Callable[..., object], *arguments: object
) -> None:
    """Require that `action`, which is `what`, raises `kind` with `named` in its message."""
    try:
        action(*arguments)
    except kind as error:
        require(named in str(error), f"{what} is refused by a message with {named!r}, not: {error}")
        return
    except Exception as error:
        raise ConformanceError(
            f"broken promise: {what} raises {kind.__name__}, not {error!r:.200}"
        ) from error
    raise ConformanceError(f"broken promise: {what} raises {kind.__name__}")


class Comparison:
    """Completions that should be the same, compared one by one, and how many were not."""

    def __init__(self, subject: Subject) -> None:
        self._rounding, self._compared, self._parted = subject.rounding, 0, 0

    def same(self, expected: Completions, given: Completions, promise: str) -> None:
        """Require equal completions, up to the subject's rounding (see `Subject.rounding`)."""
        require(len(expected) == len(given), promise)
        for a, b in zip(expected, given, strict=True):
            self._compared += 1
            shorter = min(len(a.tokens), len(b.tokens))
            length = int(np.cumprod(a.tokens[:shorter] == b.tokens[:shorter]).sum())
            near(b.logprobs[:length], a.logprobs[:length], self._rounding, promise)
            if length < max(len(a.tokens), len(b.tokens)):
                self._parted += 1
                allowed = self._rounding > 0 and self._parted <= 1 + self._compared // 50
                require(allowed, f"{promise}: {a.tokens.tolist()} became {b.tokens.tolist()}")
