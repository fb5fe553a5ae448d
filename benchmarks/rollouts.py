"""What `sampling.py` lets be sampled: group rollouts of ragged lengths, and episodes of several turns.

Prompts are pieces of a text, each begun elsewhere, so that no cache knows them from a turn before.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.subjects import Subject
from opentinker_core.config.settings import Settings
from opentinker_core.models.loading import load_tokenizer
from opentinker_core.models.source import resolve
from opentinker_core.sampling.protocol import SampleRequest, SamplingParams

GROUPS, MEMBERS = 8, 8
SHORTEST_PROMPT, LONGEST_PROMPT = 24, 120
TURNS, FIRST_PROMPT, OBSERVATION, ACTION = 8, 192, 64, 24
_TEXT = Path(__file__).parents[1] / "LICENSE"
_STOPS = 0.025
"""Of a model without a tokenizer, the share of the vocabulary at which a completion stops."""


@dataclass(frozen=True)
class Text:
    """Tokens to take prompts from, and those at which completions stop."""

    tokens: np.ndarray
    stops: tuple[int, ...]

    @classmethod
    def of(cls, subject: Subject) -> "Text":
        """The project's licence, whose sentences a completion ends; for the random model random tokens."""
        if subject.name == "tiny":
            tokens = np.random.default_rng(0).integers(0, subject.vocabulary, 4096)
            return cls(tokens, tuple(range(int(_STOPS * subject.vocabulary))))
        tokenizer = load_tokenizer(resolve("smollm2-135m", Settings().home))
        words = " ".join(_TEXT.read_text(encoding="utf-8").split())
        stops = (tokenizer.encode(stop, add_special_tokens=False) for stop in (".", "\n", ".\n", "\n\n", ";"))
        return cls(
            np.array(tokenizer.encode(words, add_special_tokens=False)),
            tuple(sorted({ids[0] for ids in stops if len(ids) == 1} | {tokenizer.eos_token_id})),
        )


class Rollouts:
    """Gives new requests as often as asked, always the same in the same order."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._draw = np.random.default_rng(0)

    def groups(self, adapters: list[str], longest: int) -> list[SampleRequest]:
        """`GROUPS` prompts, `MEMBERS` completions of each, versions by turns: over groups while they last.

        With more versions than groups the members of a group have versions of their own.

        Args:
            longest: tokens of a completion at most.
        """
        params = SamplingParams(longest, stop_token_ids=self._text.stops)
        requests = []
        for group in range(GROUPS):
            prompt = self._piece(int(self._draw.integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1)))
            seeds = [int(seed) for seed in self._draw.integers(0, 1 << 31, MEMBERS)]
            own = adapters[group::GROUPS] or [adapters[group % len(adapters)]]
            requests += [
                SampleRequest(prompt, params, version, tuple(seeds[index :: len(own)]))
                for index, version in enumerate(own)
            ]
        return requests

    def episodes(self, version: str) -> list["Episode"]:
        """`GROUPS` episodes of one version."""
        return [
            Episode(
                version,
                int(self._draw.integers(0, 1 << 31)),
                [self._piece(FIRST_PROMPT), *(self._piece(OBSERVATION) for _ in range(TURNS - 1))],
            )
            for _ in range(GROUPS)
        ]

    def _piece(self, length: int) -> tuple[int, ...]:
        start = int(self._draw.integers(0, len(self._text.tokens) - length))
        return tuple(self._text.tokens[start : start + length].tolist())


@dataclass(frozen=True)
class Episode:
    """The model speaks `ACTION` tokens, is told something, speaks again, and always sees all of it."""

    version: str
    seed: int
    observations: list[tuple[int, ...]]
    """The first is the prompt."""

    def request(self, turn: int, actions: list[list[int]]) -> SampleRequest:
        """What is asked for in a turn, after the actions of the turns before."""
        prompt = list(self.observations[0])
        for action, observation in zip(actions[:turn], self.observations[1:], strict=False):
            prompt += [*action, *observation]
        return SampleRequest(tuple(prompt), SamplingParams(ACTION), self.version, (self.seed + turn,))


def one_by_one(requests: list[SampleRequest], lengths: list[list[int]]) -> list[SampleRequest]:
    """The same completions as requests of their own, each with its length instead of stops."""
    return [
        SampleRequest(request.prompt_tokens, SamplingParams(length), request.version, (seed,))
        for request, own in zip(requests, lengths, strict=True)
        for seed, length in zip(request.seeds, own, strict=True)
    ]
