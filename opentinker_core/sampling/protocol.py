"""What a sampler is. Nouns: SampleRequest, SampledSequence, Sampler, and what they are made of."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from opentinker_core.errors import UsageError
from opentinker_core.trajectories.types import StopReason

BASE = "base"
"""The version name of the base model without an adapter."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens of one request are drawn.

    `temperature` 0 means greedy. `top_k` 0, `top_p` 1 and `min_p` 0 mean no truncation. Generation
    stops after any of `stop_token_ids`, or when the decoded text of the turn contains one of `stop`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one are dropped."""

    def __post_init__(self) -> None:
        for name, ok, accepted in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
        ):
            if not ok:
                raise UsageError(f"{name}: {getattr(self, name)!r} is not accepted; accepted: {accepted}")


@dataclass(frozen=True)
class DrawnToken:
    """One token of a completion, told as it is drawn; the numbers are as in `SampledSequence`."""

    index: int
    """Of the completion's seed in the request."""
    position: int
    """In the completion, from 0."""
    token: int
    logprob: float
    model_logprob: float | None
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and their logprobs, if asked for."""
    stop_reason: StopReason | None
    """Of the last token: why it is the last."""


Listener = Callable[[DrawnToken], None]


@dataclass(frozen=True)
class PromptQuestion:
    """What is asked about each position of a prompt but the first: row i is about token i + 1.

    All logprobs are at temperature 1, without truncation.
    """

    likeliest: int = 0
    """That many of the likeliest tokens."""
    targets: tuple[tuple[int, ...], ...] = ()
    """For each row the tokens whose logprobs are wanted, -1: none; as many in each row."""
    drawn: int = 0
    """That many tokens, drawn independently at the request's temperature, without truncation."""


@dataclass(frozen=True)
class SampleRequest:
    """`len(seeds)` completions of one prompt, all by one version; the prompt is prefilled once."""

    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    version: str
    """`policy@number` of a version the sampler was refreshed with, or `BASE`."""
    seeds: tuple[int, ...]
    """One generator seed a completion."""
    prompt_logprobs: bool = False
    """Give the logprobs of the prompt's tokens too."""
    top_logprobs: int = 0
    """Give that many of the likeliest tokens at each position too."""
    scaled_logprobs: bool = False
    """Give the logprobs at the request's temperature but without truncation too."""
    about_prompt: PromptQuestion | None = None
    """Answered by every completion."""
    listener: Listener | None = field(default=None, compare=False, repr=False)
    """Told of tokens as they are drawn, each completion's in their order and none twice, by the sampler's
    thread, which it must not keep. Samplers that get completions whole do not call it."""


@dataclass(frozen=True)
class PromptAnswer:
    """The answer to a `PromptQuestion`, for a prompt of P tokens; what was not asked is None."""

    likeliest_tokens: np.ndarray | None = None
    """int32, (P - 1, k), the likeliest first."""
    likeliest_logprobs: np.ndarray | None = None
    """float32, (P - 1, k)."""
    target_logprobs: np.ndarray | None = None
    """float32, shaped as the targets; 0 where none is asked."""
    drawn_tokens: np.ndarray | None = None
    """int32, (P - 1, n)."""
    drawn_logprobs: np.ndarray | None = None
    """float32, (P - 1, n)."""


@dataclass(frozen=True)
class SampledSequence:
    """One completion, with the logprob of each token under the distribution it was drawn from."""

    tokens: np.ndarray
    """int32, shape (T,), the stop token included."""
    logprobs: np.ndarray
    """float32, shape (T,); 0 for greedy tokens (their distribution is a point)."""
    stop_reason: StopReason
    version: str
    model_logprobs: np.ndarray | None = None
    """float32, (T,): of the same tokens at temperature 1, without truncation."""
    prompt_logprobs: np.ndarray | None = None
    """float32, (P,), if asked for: of the prompt's tokens at temperature 1; 0 for the first."""
    top_tokens: np.ndarray | None = None
    """int32, (T, k), if asked for: the likeliest tokens at each position, the likeliest first."""
    top_logprobs: np.ndarray | None = None
    """float32, (T, k): their logprobs at temperature 1, without truncation."""
    scaled_logprobs: np.ndarray | None = None
    """float32, (T,), if asked for: of the tokens at the request's temperature (1, if it is 0), without
    truncation."""
    about_prompt: PromptAnswer | None = None

    def drawn(self, index: int) -> list[DrawnToken]:
        """What a listener would have been told of this completion, seed `index` of its request."""
        last = len(self.tokens) - 1
        return [
            DrawnToken(
                index,
                at,
                int(token),
                float(self.logprobs[at]),
                None if self.model_logprobs is None else float(self.model_logprobs[at]),
                self._top(at),
                self.stop_reason if at == last else None,
            )
            for at, token in enumerate(self.tokens)
        ]

    def _top(self, at: int) -> tuple[tuple[int, float], ...]:
        if self.top_tokens is None or self.top_logprobs is None:
            return ()
        pairs = zip(self.top_tokens[at].tolist(), self.top_logprobs[at].tolist(), strict=True)
        return tuple(pairs)


class Sampler(Protocol):
    """Generates tokens from pinned versions. Publishing a newer version changes nothing for older ones."""

    def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        """Make `version` available from its sampler snapshot; idempotent.

        Raises:
            SnapshotError: the snapshot is missing or corrupt; what was served before still is.
        """
        ...

    def release(self, version: str) -> None:
        """Say that nobody will ask for `version` again; requests that run end in peace. Idempotent."""
        ...

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[SampledSequence]]:
        """Complete every request; result[i][j] belongs to seed j of request i.

        A completion depends on its request's version, prompt, params and seed, and on nothing that
        is sampled beside it.

        Raises:
            UsageError: a request names a version the sampler was not refreshed with, or its
                prompt is empty or leaves no room in the model's context.
        """
        ...
