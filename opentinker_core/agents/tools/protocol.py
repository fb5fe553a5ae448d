"""What a tool is: a name, a description, the schema of its arguments, and `call`, which always answers.

A tool's answer is text for the model to read. What goes wrong because of the model (a tool that does not
exist, arguments of a wrong type, code that raises, an answer that takes too long) is an answer too, with
the kind of error. Only what is wrong with the installation raises.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from opentinker_core.agents.tools.formats import CallProblem, ToolCall, ToolDeclaration
from opentinker_core.errors import UsageError


class ToolError(StrEnum):
    """What kept a call from its result."""

    MALFORMED_CALL = "malformed_call"
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    OVER_LIMIT = "over_limit"


@dataclass(frozen=True)
class ToolResult:
    """Text for the model, and what kind of error it tells of, if it does."""

    text: str
    error: ToolError | None = None


@dataclass(frozen=True)
class Deadline:
    """A moment of this process's monotonic clock, in seconds, by which an answer is wanted."""

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """The moment `seconds` from now."""
        return cls(time.monotonic() + seconds)

    def sooner(self, seconds: float) -> "Deadline":
        """This moment, or the one `seconds` from now, if that comes before."""
        return Deadline(min(self.at_s, time.monotonic() + seconds))

    def remaining_s(self) -> float:
        """Seconds that are left; negative once it has passed."""
        return self.at_s - time.monotonic()


class Tool(Protocol):
    """Something that a model can call by name."""

    @property
    def name(self) -> str:
        """What the model calls it by."""
        ...

    @property
    def description(self) -> str:
        """What it does, for the model to read."""
        ...

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of its arguments: an object."""
        ...

    @property
    def queue(self) -> str | None:
        """Calls of one round to tools of the same queue are made one after the other, in their order; None:
        a call cannot be told from another that runs beside it."""
        ...

    @property
    def computes(self) -> bool:
        """Whether a call takes this machine's processor, rather than waiting for another one."""
        ...

    def call(self, arguments: Mapping[str, Any], deadline: Deadline) -> ToolResult:
        """Answer before the deadline; arguments that do not fit the schema are an error of the answer."""
        ...


class Arguments(BaseModel):
    """Base of the models of tools' arguments: no conversions, no unknown names."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


A = TypeVar("A", bound=Arguments)


def schema_of(model: type[Arguments]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, without pydantic's titles, which say nothing to a model."""
    schema = model.model_json_schema()
    schema.pop("title", None)
    schema.pop("description", None)  # the docstring of the class: for programmers
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
    return schema


def checked(model: type[A], arguments: Mapping[str, Any]) -> A | ToolResult:
    """The arguments as `model`, or the answer that says which of them are wrong, and how."""
    try:
        return model.model_validate(dict(arguments))
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, detail['loc']))}: {detail['msg']} (given: {detail['input']!r:.80})"
            for detail in error.errors(include_url=False, include_context=False)
        )
        accepted = ", ".join(model.model_fields)
        return ToolResult(
            f"Error: wrong arguments: {problems:.1000}; accepted: {accepted}", ToolError.INVALID_ARGUMENTS
        )


class Toolbox:
    """The tools of one agent, by name."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        """Collect them.

        Raises:
            UsageError: two have the same name.
        """
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) != len(tools):
            names = ", ".join(sorted(tool.name for tool in tools))
            raise UsageError(f"tools: {names}: a name is there twice; accepted: each name once")

    @cached_property
    def declarations(self) -> tuple[ToolDeclaration, ...]:
        """What the model is told of them, in order."""
        return tuple(
            ToolDeclaration(tool.name, tool.description, tool.parameters) for tool in self._tools.values()
        )

    def tool_of(self, call: ToolCall | CallProblem) -> Tool | None:
        """The tool that is meant, if there is one."""
        return self._tools.get(call.name) if isinstance(call, ToolCall) else None

    def call(self, call: ToolCall | CallProblem, deadline: Deadline) -> ToolResult:
        """The answer to what a format's parser found: to a call that cannot be read as well."""
        if isinstance(call, CallProblem):
            return ToolResult(f"Error: this tool call cannot be read: {call}", ToolError.MALFORMED_CALL)
        tool = self._tools.get(call.name)
        if tool is None:
            accepted = ", ".join(self._tools) or "none"
            return ToolResult(
                f"Error: there is no tool {call.name!r:.80}; accepted: {accepted}", ToolError.UNKNOWN_TOOL
            )
        return tool.call(call.arguments, deadline)
