"""Agents without a model: a tokenizer of bytes, and a sampler that says what a function tells it to."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from envs.multi import MultiEnvironment
from opentinker_core.agents.coordination.protocol import CoordinationProtocol
from opentinker_core.agents.playing import EpisodeSpec, Play, Table
from opentinker_core.agents.seats import Seat
from opentinker_core.agents.tools.formats import tool_format
from opentinker_core.agents.tools.making import open_tools
from opentinker_core.config.tools import ToolsConfig
from opentinker_core.models.renderer import Renderer
from opentinker_core.sampling.protocol import SampledSequence, SampleRequest, SamplingParams
from opentinker_core.trajectories.types import StopReason, Trajectory

END = 256


class Bytes:
    """A token is a byte, or the end of a turn."""

    eos_token_id = END
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return bytes(token for token in ids if token < END).decode(errors="replace")


TOKENIZER: Any = Bytes()


def text_of(trajectory: Trajectory) -> str:
    """All that was shown and said."""
    return TOKENIZER.decode(trajectory.tokens_T.tolist())


class Speaker:
    """A sampler that says `say(prompt)`; notes how many requests each call had, and all texts."""

    def __init__(self, say: Callable[[str], str]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self.calls: list[int] = []
        self.spoken: list[tuple[str, str]] = []
        """Prompts and what was said."""

    def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        raise NotImplementedError

    def release(self, version: str) -> None:
        raise NotImplementedError

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[SampledSequence]]:
        with self._lock:
            self.calls.append(len(requests))
        return [[self._one(request)] * len(request.seeds) for request in requests]

    def _one(self, request: SampleRequest) -> SampledSequence:
        prompt = TOKENIZER.decode(request.prompt_tokens)
        said = self._say(prompt)
        with self._lock:
            self.spoken.append((prompt, said))
        tokens = np.array([*said.encode(), END], np.int32)
        return SampledSequence(tokens, np.zeros(len(tokens), np.float32), StopReason.STOP, request.version)


def table(
    make: Callable[[], MultiEnvironment],
    protocol: CoordinationProtocol,
    step_s: float,
    tools: ToolsConfig | None = None,
) -> Table:
    """A table at which all agents of `protocol` sit alike."""
    renderer = Renderer(TOKENIZER, "plain", tool_format("json") if tools else None)
    seat = Seat(
        "spoken",
        renderer,
        SamplingParams(max_tokens=1000, stop_token_ids=(END,)),
        (),
        100_000,
        open_tools=(lambda: open_tools(tools, TOKENIZER)) if tools else None,
    )
    return Table("spoken", make, protocol, dict.fromkeys(protocol.agents, seat), 1, step_s)


def plays(number: int, versions: Mapping[str, str]) -> list[Play]:
    """So many episodes; each has its number for a seed."""
    return [Play(EpisodeSpec(seed, seed, 0, 1000 + seed), versions) for seed in range(number)]
