"""What a sampler is. Nouns: SampleRequest, SampledSequence, Sampler."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from opentinker_core.trajectories.types import StopReason

BASE = "base"
"""The version name of the base model without an adapter."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens of one request are drawn.

    `temperature` 0 means greedy. `top_k` 0 and `top_p` 1 mean no truncation. Generation stops
    after any of `stop_token_ids`, or when the decoded text of the turn contains one of `stop`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class SampleRequest:
    """`len(seeds)` completions of one prompt, all by one version; the prompt is prefilled once."""

    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    version: str
    """`policy@number` of a version the sampler was refreshed with, or `BASE`."""
    seeds: tuple[int, ...]
    """One generator seed a completion."""


@dataclass(frozen=True)
class SampledSequence:
    """One completion, with the logprob of each token under the distribution it was drawn from."""

    tokens: np.ndarray
    """int32, shape (T,), the stop token included."""
    logprobs: np.ndarray
    """float32, shape (T,); 0 for greedy tokens (their distribution is a point)."""
    stop_reason: StopReason
    version: str


class Sampler(Protocol):
    """Generates tokens from pinned versions. Publishing a newer version changes nothing for older ones."""

    def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        """Make `version` available from its sampler snapshot; idempotent.

        Raises:
            SnapshotError: the snapshot is missing or corrupt; what was served before still is.
        """
        ...

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[SampledSequence]]:
        """Complete every request; result[i][j] belongs to seed j of request i.

        Raises:
            UsageError: a request names a version the sampler was not refreshed with, or its
                prompt is empty or leaves no room in the model's context.
        """
        ...
