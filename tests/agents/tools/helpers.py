"""Agents that say what is written for them, and tools whose calls can be watched."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.protocol import Observation
from opentinker_core.agents.coordination.actors import Deadline as TurnDeadline
from opentinker_core.agents.tools.formats import tool_format
from opentinker_core.agents.tools.opened import OpenTools
from opentinker_core.agents.tools.protocol import Deadline, Tool, Toolbox, ToolResult
from opentinker_core.agents.tools.rounds import Answer, answer
from opentinker_core.config.tools import ToolsConfig
from tests.waiting import PATIENCE_S

CONFIG = ToolsConfig(names=("calculator",), call_s=PATIENCE_S)
QUESTION = Observation.user("?")


@dataclass
class Speaker:
    """Says its lines, and keeps what it was shown."""

    lines: Sequence[str]
    shown: list[Observation] = field(default_factory=list)

    async def __call__(self, observation: Observation) -> str:
        self.shown.append(observation)
        return self.lines[len(self.shown) - 1]


@dataclass
class Made:
    """A tool that answers by a function."""

    answer: Callable[[Mapping[str, Any], Deadline], ToolResult]
    name: str = "made"
    description: str = "Answers."
    queue: str | None = None
    computes: bool = False
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object"})

    def call(self, arguments: Mapping[str, Any], deadline: Deadline) -> ToolResult:
        return self.answer(arguments, deadline)


def opened(
    *tools: Tool, config: ToolsConfig = CONFIG, on_close: Callable[[], None] | None = None
) -> OpenTools:
    wire = tool_format("hermes" if config.format == "auto" else config.format)
    return OpenTools(config, wire, Toolbox(tools), on_close or (lambda: None))


def call(name: str, arguments: str) -> str:
    """A call as a Hermes model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def play(tools: OpenTools, speaker: Speaker, seconds: float = PATIENCE_S) -> Answer:
    async def one() -> Answer:
        return await answer(speaker, QUESTION, tools, TurnDeadline.after(seconds))

    return asyncio.run(one())


class Gate:
    """Where a tool waits until the test lets it go on."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self._open.wait(PATIENCE_S)

    def open(self) -> None:
        self._open.set()
