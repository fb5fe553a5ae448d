"""Only what was sampled carries weight: the datums of 1,000 episodes against the sampler's own log."""

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.protocol import Action, Observation, StepResult
from opentinker_core.agents.episodes import EpisodeSettings, EpisodeSpec, play
from opentinker_core.agents.tools.formats import ToolCall, tool_format
from opentinker_core.agents.tools.making import open_tools
from opentinker_core.config.episodes import EpisodesConfig
from opentinker_core.config.tools import ToolsConfig
from opentinker_core.models.loading import load_tokenizer
from opentinker_core.models.renderer import Renderer
from opentinker_core.models.source import resolve
from opentinker_core.sampling.protocol import SampledSequence, SampleRequest, SamplingParams
from opentinker_core.trajectories.datums import to_datum
from opentinker_core.trajectories.parts import parts_of
from opentinker_core.trajectories.types import EndReason, StopReason, Trajectory
from tests.models import templates

PER_CASE = 84
"""Episodes of each of the twelve cases: 1,008 in all."""
VERSION = "talker@3"


class Talk:
    """Some turns; everything that it says is its own."""

    def __init__(self) -> None:
        self._left = 0

    def reset(self, seed: int) -> Observation:
        self._left = 1 + seed % 3
        return Observation.user(f"Problem {seed}: what is {seed % 97} * {seed % 89}?")

    def step(self, action: Action) -> StepResult:
        self._left -= 1
        return StepResult(Observation.user(f" no: {len(action.text)} "), 0.5, self._left == 0)


class Scripted:
    """Says calls that are right, wrong and unreadable, and plain words; its log is the truth."""

    def __init__(self, renderer: Renderer, wire: str) -> None:
        self._renderer, self._wire = renderer, tool_format(wire)
        self.log: list[tuple[tuple[int, ...], SampledSequence]] = []

    def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        raise NotImplementedError

    def release(self, version: str) -> None:
        raise NotImplementedError

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[SampledSequence]]:
        return [[self._one(request, seed) for seed in request.seeds] for request in requests]

    def _one(self, request: SampleRequest, seed: int) -> SampledSequence:
        draw = random.Random(seed)
        text = self._text(draw)
        tokens = np.array(self._renderer.demonstration(Action(text)), np.int32)
        reason = StopReason.STOP
        if draw.random() < 0.2:  # cut off by the limit: no end of turn was sampled
            tokens, reason = tokens[: max(1, len(tokens) // 2)], StopReason.LENGTH
        logprobs = -np.array([draw.uniform(0.01, 5) for _ in tokens], np.float32)
        sequence = SampledSequence(tokens, logprobs, reason, request.version)
        self.log.append((request.prompt_tokens, sequence))
        return sequence

    def _text(self, draw: random.Random) -> str:
        kind = draw.random()
        right = ToolCall("calculator", {"expression": f"{draw.randrange(99)}*{draw.randrange(99)}"})
        if kind < 0.3:
            return self._wire.render([right])
        if kind < 0.4:
            return self._wire.render([right, ToolCall("calculator", {"expression": "1/0"})])
        if kind < 0.5:
            return self._wire.render([ToolCall("unknown", {"x": 1})])
        if kind < 0.6:
            return self._wire.render([right])[:-3]
        thought = "<think>\nhm\n</think>\n\n" if kind < 0.7 else ""
        return f"{thought}The answer is {draw.randrange(9999)}."


FAMILIES = {
    "chatml": templates.CHATML,
    "qwen25": templates.QWEN25,
    "qwen3": templates.QWEN3,
    "llama31": templates.LLAMA31,
    "hermes": templates.HERMES,
    "plain": None,
}
WIRES = {"qwen25": "hermes", "qwen3": "hermes", "hermes": "hermes", "llama31": "llama3"}
CASES = [
    *(
        (template, wire, "append")
        for template in ("chatml", "plain")
        for wire in ("hermes", "llama3", "json")
    ),
    *((template, wire, "append") for template, wire in WIRES.items()),
    *((template, WIRES[template], "template") for template in ("qwen3", "qwen25")),
]


@pytest.fixture(scope="module")
def tokenizer(tiny_home: Path) -> Any:
    """That of the tiny model, with the special tokens of all families."""
    tokenizer = copy.deepcopy(load_tokenizer(resolve("tiny", tiny_home)))
    tokenizer.add_special_tokens({"additional_special_tokens": templates.SPECIAL_TOKENS})
    tokenizer.bos_token = "<pad>"
    return tokenizer


@pytest.mark.parametrize(("template", "wire", "history"), CASES)
def test_the_weights_are_on_the_sampled_tokens_and_nowhere_else(
    tokenizer: Any, template: str, wire: str, history: Any
) -> None:
    tools = ToolsConfig(names=("calculator",), format=wire, max_rounds=3, on_malformed="mask")
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = FAMILIES[template]
    renderer = Renderer(tokenizer, "plain" if template == "plain" else "chat", tool_format(wire))
    sampler = Scripted(renderer, wire)
    settings = EpisodeSettings(
        "talk",
        Talk,
        renderer,
        SamplingParams(512, stop_token_ids=renderer.stop_token_ids),
        (),
        max_turns=8,
        max_context=100_000,
        step=1,
        limits=EpisodesConfig(history=history),
        open_tools=lambda: open_tools(tools, tokenizer),
    )
    specs = [EpisodeSpec(1000 + index, index, 0, 7 * index) for index in range(PER_CASE)]
    trajectories = play(specs, settings, sampler, VERSION)
    assert len(parts_of(trajectories)) == PER_CASE
    assert any(len(one.turns) > 2 for one in trajectories)
    _compare(trajectories, sampler.log)
    forks = len(trajectories) - PER_CASE
    assert (forks > 0) == (history == "template" and renderer.rewrites_history is not None)


def _compare(
    trajectories: Sequence[Trajectory], log: Sequence[tuple[tuple[int, ...], SampledSequence]]
) -> None:
    """Every sampled turn stands in exactly one row, after the very prompt that it was sampled from."""
    said = {}
    for prompt, sequence in log:
        said.setdefault((prompt, tuple(sequence.tokens.tolist())), []).append(sequence)
    found = 0
    for one in trajectories:
        assert one.end_reason is EndReason.DONE
        masked = set(one.info.get("masked_turns", ()))
        weights = np.zeros(len(one.tokens_T), bool)
        for turn in one.turns:
            prompt = tuple(one.tokens_T[: turn.start].tolist())
            tokens = tuple(one.tokens_T[turn.start : turn.end].tolist())
            sequence = said[prompt, tokens].pop()
            np.testing.assert_array_equal(one.logprobs_T[turn.start : turn.end], sequence.logprobs)
            weights[turn.start : turn.end] = turn.index not in masked
            found += 1
        if not weights.any():
            continue
        datum = to_datum(one, advantages=[1.5] * len(one.turns), without=masked)
        expected = weights[1 : len(datum) + 1]
        np.testing.assert_array_equal(datum.mask_N, expected)
        assert not weights[len(datum) + 1 :].any()
        np.testing.assert_array_equal(datum.advantages_N != 0, expected)
    assert found == len(log)
