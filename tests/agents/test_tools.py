"""Tools by name: declarations are valid schemas, and every call gets an answer, whatever the model wrote."""

from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.agents.tools.calculator import Calculator
from opentinker_core.agents.tools.formats import CallProblem, ToolCall, Trouble, tool_format
from opentinker_core.agents.tools.protocol import Deadline, Tool, Toolbox, ToolError, ToolResult, schema_of
from opentinker_core.agents.tools.sandbox import PythonArguments
from opentinker_core.errors import UsageError
from tests.waiting import PATIENCE_S


class Echo:
    """Answers with what it was given."""

    name = "echo"
    description = "Repeats."
    queue = None
    computes = False

    @property
    def parameters(self) -> dict[str, Any]:
        return {"type": "object"}

    def call(self, arguments: Mapping[str, Any], deadline: Deadline) -> ToolResult:
        return ToolResult(f"{dict(arguments)} {deadline.remaining_s() > 0}")


TOOLBOX = Toolbox([Calculator(), Echo()])


def answer(call: ToolCall | CallProblem) -> ToolResult:
    return TOOLBOX.call(call, Deadline.after(PATIENCE_S))


def test_declarations_are_valid_schemas_of_objects() -> None:
    assert [declaration.name for declaration in TOOLBOX.declarations] == ["calculator", "echo"]
    for schema in (Calculator().parameters, schema_of(PythonArguments)):
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object"
        assert schema["additionalProperties"] is False
        assert "title" not in str(schema)
        assert all("description" in field for field in schema["properties"].values())


@given(
    st.dictionaries(
        st.sampled_from(["expression", "other"]),
        st.none() | st.integers() | st.text(max_size=1100),
        max_size=2,
    )
)
def test_arguments_are_refused_where_the_schema_refuses_them(arguments: dict[str, Any]) -> None:
    tool: Tool = Calculator()
    valid = jsonschema.Draft202012Validator(tool.parameters).is_valid(arguments)
    refused = tool.call(arguments, Deadline.after(PATIENCE_S)).error is ToolError.INVALID_ARGUMENTS
    assert refused is not valid


def test_a_call_reaches_its_tool() -> None:
    assert answer(ToolCall("calculator", {"expression": "6 * 7"})) == ToolResult("42")
    assert answer(ToolCall("echo", {"a": 1})) == ToolResult("{'a': 1} True")


def test_an_unknown_tool_is_told_with_those_that_are_there() -> None:
    result = answer(ToolCall("compass", {}))
    assert result == ToolResult(
        "Error: there is no tool 'compass'; accepted: calculator, echo", ToolError.UNKNOWN_TOOL
    )
    assert Toolbox([]).call(ToolCall("f", {}), Deadline.after(1)).text.endswith("accepted: none")


def test_wrong_arguments_name_the_field_the_value_and_what_is_accepted() -> None:
    result = answer(ToolCall("calculator", {"expression": 3, "precision": 2}))
    assert result.error is ToolError.INVALID_ARGUMENTS
    assert "expression: Input should be a valid string (given: 3)" in result.text
    assert "precision: Extra inputs are not permitted (given: 2)" in result.text
    assert result.text.endswith("accepted: expression")


def test_a_call_that_cannot_be_read_is_answered() -> None:
    result = answer(CallProblem(Trouble.NO_NAME, "no name", 7))
    assert result == ToolResult(
        "Error: this tool call cannot be read: no name (at character 7)", ToolError.MALFORMED_CALL
    )


def test_an_answer_with_several_calls_is_answered_call_by_call() -> None:
    text = (
        '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call>'
        "<tool_call>calculator(2)</tool_call>"
        '<tool_call>{"name": "echo", "arguments": {}}</tool_call>'
    )
    errors = [answer(call).error for call in tool_format("hermes").parse(text).calls]
    assert errors == [None, ToolError.MALFORMED_CALL, None]


def test_a_name_that_is_there_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="echo, echo: a name is there twice"):
        Toolbox([Echo(), Echo()])


def test_deadlines_are_moments() -> None:
    later = Deadline.after(PATIENCE_S)
    assert later.sooner(2 * PATIENCE_S) == later
    assert later.sooner(1.0).at_s < later.at_s
    assert Deadline.after(-1).remaining_s() < 0
