"""Thousands of dialogues with tools: what is recorded is what was shown and sampled, to the token.

An agent draws its turns at random: answers, calls, several calls, broken calls, reasoning; ended by a stop
token or cut off. The record is kept here, apart from the renderer, and compared with two oracles: the
text of every piece, and the chat template on the whole conversation.
"""

import asyncio
import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.protocol import Action, Message, Observation
from opentinker_core.agents.coordination.actors import Deadline
from opentinker_core.agents.tools.calculator import Calculator
from opentinker_core.agents.tools.formats import CallProblem, ToolCall, ToolFormat, tool_format
from opentinker_core.agents.tools.opened import OpenTools
from opentinker_core.agents.tools.protocol import Toolbox
from opentinker_core.agents.tools.rounds import Answer, answer
from opentinker_core.config.tools import ToolsConfig
from opentinker_core.models.renderer import Renderer
from tests.agents.tools.helpers import Made, ToolResult
from tests.models.templates import CHATML, GEMMA, HERMES, LLAMA31, MISTRAL, QWEN3, QWEN25, SPECIAL_TOKENS
from tests.waiting import PATIENCE_S

KINDS: dict[str, tuple[Any, str]] = {
    "chatml-json": (CHATML, "json"),
    "chatml-hermes": (CHATML, "hermes"),
    "qwen25-hermes": (QWEN25, "hermes"),
    "qwen3-hermes": (QWEN3, "hermes"),
    "hermes-hermes": ({"default": CHATML, "tool_use": HERMES}, "hermes"),
    "llama31-llama3": (LLAMA31, "llama3"),
    "llama31-json": (LLAMA31, "json"),
    "gemma-json": (GEMMA, "json"),
    "mistral-hermes": (MISTRAL, "hermes"),
    "plain-json": (None, "json"),
    "plain-hermes": (None, "hermes"),
    "plain-llama3": (None, "llama3"),
}
FAITHFUL = ("chatml", "qwen25")
"""Templates that write again what was recorded."""

EXAMPLES = int(os.environ.get("OPENTINKER_DIALOGUES", "600")) // len(KINDS)
"""Dialogues of each kind."""

ASCII = st.text(
    st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="<") | st.just("\n"), max_size=12
)
EXPRESSIONS = st.sampled_from(["40 + 2", "2 ** 10", "1 / 0", "(", "3 * (2 + 5)"])
ARGUMENTS = st.fixed_dictionaries({"expression": EXPRESSIONS}) | st.dictionaries(ASCII, ASCII, max_size=2)
CALLS = st.builds(ToolCall, st.sampled_from(["calculator", "echo", "compass"]), ARGUMENTS)
BROKEN = st.sampled_from(
    ['{"name": "calculator", "arguments": {', "<tool_call>f(1)</tool_call>", '{"name": 3}', "<|python_tag|>{"]
)


@dataclass(frozen=True)
class Turn:
    """What the agent says, and whether it says so to the end."""

    text: str
    ended: bool


@dataclass
class Record:
    """An agent that says prepared turns, and all that was recorded of it."""

    renderer: Renderer
    draw: Callable[[], Turn]
    declarations: Sequence[Any]
    pieces: list[tuple[Observation | Turn, list[int]]] = field(default_factory=list)

    async def speak(self, observation: Observation) -> str:
        last = self.pieces[-1][1] if self.pieces else None
        shown = (
            self.renderer.initial(observation, self.declarations)
            if last is None
            else self.renderer.following(observation, last)
        )
        said = self.draw()
        generated = self.renderer.demonstration(Action(said.text))
        generated = generated if said.ended else generated[:-1]
        self.pieces += [(observation, shown), (said, generated)]
        return self.renderer.action_text(generated, ())

    @property
    def ids(self) -> list[int]:
        return [token for _, tokens in self.pieces for token in tokens]

    @property
    def messages(self) -> list[Message]:
        return [
            message
            for piece, _ in self.pieces
            for message in (
                piece.messages if isinstance(piece, Observation) else [Message("assistant", piece.text)]
            )
        ]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tiny_tokenizer: Any) -> tuple[str, Any, Renderer, ToolFormat]:
    template, wire = KINDS[request.param][0], tool_format(KINDS[request.param][1])
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
    tokenizer.bos_token, tokenizer.chat_template, tokenizer.model_max_length = "<pad>", template, 10**6
    renderer = Renderer(tokenizer, "plain" if template is None else "chat", wire)
    return request.param.partition("-")[0], tokenizer, renderer, wire


def said(wire: ToolFormat) -> st.SearchStrategy[str]:
    calls = st.lists(CALLS, min_size=1, max_size=4).map(wire.render)
    called = st.builds(lambda text, call: f"{text}{call}" if wire.name == "hermes" else call, ASCII, calls)
    spoken = called | called | ASCII | BROKEN
    return spoken | st.builds(lambda thought, text: f"<think>\n{thought}\n</think>\n\n{text}", ASCII, spoken)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_recorded_tokens_are_those_that_were_shown_and_sampled(kind: Any, data: st.DataObject) -> None:
    family, tokenizer, renderer, wire = kind
    config = ToolsConfig(
        names=("calculator",),
        max_rounds=data.draw(st.integers(1, 4)),
        max_calls=data.draw(st.integers(1, 4)),
        call_s=PATIENCE_S,
        on_malformed="mask",
        max_result_chars=100,
    )
    echo = Made(lambda arguments, deadline: ToolResult(str(dict(arguments))), "echo")
    tools = OpenTools(config, wire, Toolbox([Calculator(), echo]))
    turns = st.builds(Turn, said(wire), st.booleans())
    told = tools.declarations if data.draw(st.booleans()) else ()
    record = Record(renderer, lambda: data.draw(turns), told)
    questions = data.draw(st.lists(ASCII.filter(str.strip), min_size=1, max_size=2))

    async def play() -> None:
        for question in questions:
            before = len(record.pieces)
            answered = await answer(
                record.speak, Observation.user(question), tools, Deadline.after(PATIENCE_S)
            )
            check(record.pieces[before:], answered, config, tools)

    asyncio.run(play())
    check_texts(record, tokenizer, renderer)
    if family in FAITHFUL and all(piece.ended for piece, _ in record.pieces if isinstance(piece, Turn)):
        last = record.pieces[-1][1]
        assert renderer.whole(record.messages[:-1], told) == record.ids[: -len(last)]


def check(pieces: Sequence[Any], answered: Answer, config: ToolsConfig, tools: OpenTools) -> None:
    """What one turn of the agent came to follows from what it said."""
    spoken = [piece for piece, _ in pieces if isinstance(piece, Turn)]
    shown = [piece for piece, _ in pieces if isinstance(piece, Observation)]
    found = [tools.parse(turn.text).calls for turn in spoken]
    assert answered.rounds == len(spoken) - 1 <= config.max_rounds
    assert all(found[:-1])
    assert not found[-1] or answered.rounds == config.max_rounds
    assert [len(observation.messages) for observation in shown[1:]] == [len(calls) for calls in found[:-1]]
    assert answered.calls == sum(map(len, found[:-1]))
    unread = [any(isinstance(call, CallProblem) for call in calls) for calls in found]
    assert answered.masked == tuple(index for index, is_unread in enumerate(unread) if is_unread)
    if not found[-1]:
        assert answered.text == spoken[-1].text


def check_texts(record: Record, tokenizer: Any, renderer: Renderer) -> None:
    """Every piece decodes to what was shown or said, and nothing is there twice or missing."""
    whole = tokenizer.decode(record.ids, skip_special_tokens=False)
    parts = [tokenizer.decode(tokens, skip_special_tokens=False) for _, tokens in record.pieces]
    assert whole == "".join(parts)
    for (piece, tokens), text in zip(record.pieces, parts, strict=True):
        if isinstance(piece, Turn):
            ended = tokenizer.decode([renderer.stop_token_ids[0]]) if piece.ended else ""
            assert text == piece.text + ended
        else:
            assert len(tokens) > 0
            at = 0
            for message in piece.messages:
                quoted = (
                    message.content.strip().replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
                )
                places = [text.find(form, at) for form in (message.content.strip(), quoted)]
                assert max(places) >= 0, (message, text)
                at = max(places)
