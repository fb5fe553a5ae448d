"""Calls in models' own formats: what is rendered is read back; what cannot be read is told, not raised."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.agents.tools.formats import (
    CallProblem,
    ParsedAnswer,
    ToolCall,
    ToolDeclaration,
    Trouble,
    format_of_template,
    tool_format,
)
from opentinker_core.errors import UsageError

FORMATS = ["hermes", "llama3", "json"]
MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    ";",
    ",",
    "```json\n",
    "```",
    "[",
    "]",
    "{",
    "}",
    '"name"',
]

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.text(min_size=1)
calls = st.builds(
    ToolCall, names, st.dictionaries(st.text() | st.sampled_from(MARKS), json_values, max_size=4)
)
junk = st.lists(
    st.sampled_from(
        [*MARKS, '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {}}', '"', "NaN", " "]
    )
    | st.text(max_size=5)
).map("".join)


def written(parsed: ParsedAnswer) -> list[str]:
    """As text, in which 1, 1.0 and true differ."""
    return [json.dumps([call.name, call.arguments]) for call in parsed.calls if isinstance(call, ToolCall)]


@pytest.mark.parametrize("name", FORMATS)
@given(several=st.lists(calls, min_size=1, max_size=3))
def test_what_is_rendered_is_read_back(name: str, several: list[ToolCall]) -> None:
    wire = tool_format(name)
    parsed = wire.parse(wire.render(several))
    assert parsed == ParsedAnswer("", tuple(several))
    assert written(parsed) == [json.dumps([call.name, call.arguments]) for call in several]


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text() | junk)
def test_junk_never_raises(name: str, text: str) -> None:
    parsed = tool_format(name).parse(text)
    for call in parsed.calls:
        if isinstance(call, CallProblem):
            assert 0 <= call.position <= len(text)
            assert str(call)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["", "It is 4.", "{1, 2, 3}", '{"answer": 4}', "[1, 2]", 'She said "name".'])
def test_an_answer_without_calls_is_content(name: str, text: str) -> None:
    assert tool_format(name).parse(f" {text}\n") == ParsedAnswer(text, ())


@pytest.mark.parametrize("name", FORMATS)
def test_the_declaration_holds_each_schema(name: str) -> None:
    schema = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    tools = [
        ToolDeclaration("look", "Looks něco up.", schema),
        ToolDeclaration("wait", "Waits.", {"type": "object"}),
    ]
    text = tool_format(name).declare(tools)
    squeezed = "".join(text.split())
    for tool in tools:
        assert "".join(json.dumps(tool.as_function()["function"], ensure_ascii=False).split()) in squeezed


def test_no_calls_are_rendered_as_nothing() -> None:
    assert [tool_format(name).render([]) for name in FORMATS] == ["", "", ""]


def test_hermes_declares_as_the_template_of_qwen_does() -> None:
    text = tool_format("hermes").declare([ToolDeclaration("f", "Does.", {"type": "object"})])
    function = '{"name": "f", "description": "Does.", "parameters": {"type": "object"}}'
    assert f'<tools>\n{{"type": "function", "function": {function}}}\n</tools>' in text
    assert text.endswith(
        "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def test_results_are_written_as_the_format_has_them() -> None:
    hermes = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert tool_format("hermes").respond(["1", "2"]) == hermes
    assert [tool_format(name).respond(["1", "2"]) for name in ("llama3", "json")] == ["=> 1\n=> 2"] * 2


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (
            r"""{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}" }}""",
            "hermes",
        ),
        ("""{{- '<tool_call>\n{"name": "' + c.name + '", "arguments": ' }}""", "hermes"),
        ("{{- '<tool_call>\n<function=' + call.name + '>\n' }}{% for k in call.arguments %}", None),
        ("""{{- '<|python_tag|>' + tool_call.name + '.call(' }}""", "llama3"),
        ("""{{- "<|start_header_id|>ipython<|end_header_id|>" }}""", "llama3"),
        ("""{{- '[TOOL_CALLS] [' + tool_call.function|tojson }}""", None),
        ("{{- message.role }}", None),
    ],
    ids=[
        "Qwen's words",
        "Qwen's calls",
        "Qwen 3 Coder",
        "Llama 3's tag",
        "Llama 3's role",
        "Mistral",
        "no tools",
    ],
)
def test_the_format_that_a_template_writes(template: str, name: str | None) -> None:
    assert format_of_template(template) == name


def test_hermes_calls_stand_between_text() -> None:
    text = (
        'First.\n<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call>"}}\n</tool_call>\nThen'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call> done.'
    )
    expected = (ToolCall("f", {"x": "</tool_call>"}), ToolCall("g", {}))
    assert tool_format("hermes").parse(text) == ParsedAnswer("First.\n\nThen done.", expected)


def test_hermes_closing_tag_may_be_cut_off_by_a_stop_string() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n'
    assert tool_format("hermes").parse(text) == ParsedAnswer("", (ToolCall("f", {}),))


@pytest.mark.parametrize(
    ("inside", "trouble", "message"),
    [
        ("", Trouble.NOT_JSON, "not JSON: Expecting value"),
        ("f(x=1)", Trouble.NOT_JSON, "not JSON: Expecting value"),
        ('{"name": "f", "arguments": {"x": 1}', Trouble.NOT_JSON, "not JSON: Expecting ',' delimiter"),
        ("{'name': 'f'}", Trouble.NOT_JSON, "not JSON: Expecting property name"),
        ('{"name": "f", "arguments": {"x": NaN}}', Trouble.NOT_JSON, "not JSON: NaN is no value of JSON"),
        ('{"name": "f", "arguments": {"x": 1e999}}', Trouble.NOT_JSON, "the number 1e999 is too large"),
        ('{"name": "f", "arguments": {"x": 1, "x": 2}}', Trouble.NOT_JSON, "a name is there twice"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', Trouble.NOT_JSON, "a lone surrogate"),
        ('{"name": "f", "arguments": {"x": ' + "[" * 10**5, Trouble.NOT_JSON, "nested too deeply"),
        (
            '{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}",
            Trouble.NOT_JSON,
            "not JSON: Exceeds the limit",
        ),
        ("[1]", Trouble.NOT_A_CALL, "expected a JSON object, found a list"),
        ("null", Trouble.NOT_A_CALL, "expected a JSON object, found null"),
        ('{"arguments": {}}', Trouble.NO_NAME, '"name": expected the name of a tool, found none'),
        ('{"name": 3, "arguments": {}}', Trouble.NO_NAME, "found a number"),
        ('{"name": "", "arguments": {}}', Trouble.NO_NAME, "found a string"),
        ('{"name": "f"}', Trouble.BAD_ARGUMENTS, '"arguments": expected a JSON object, found none'),
        ('{"name": "f", "arguments": "{}"}', Trouble.BAD_ARGUMENTS, "found a string"),
        ('{"name": "f", "arguments": true}', Trouble.BAD_ARGUMENTS, "found true or false"),
        ('{"name": "f", "parameters": {}}', Trouble.BAD_ARGUMENTS, "'parameters' is unknown beside \"name\""),
        (
            '{"name": "f", "arguments": {}} {}',
            Trouble.UNCLOSED,
            "expected </tool_call> after the JSON object",
        ),
    ],
)
def test_hermes_tells_what_is_wrong_and_reads_on(inside: str, trouble: Trouble, message: str) -> None:
    text = f'a<tool_call>{inside}</tool_call>b<tool_call>{{"name": "g", "arguments": {{}}}}</tool_call>c'
    parsed = tool_format("hermes").parse(text)
    assert parsed.content == "abc"
    problem, following = parsed.calls
    assert isinstance(problem, CallProblem)
    assert problem.trouble is trouble
    assert message in problem.message
    assert len("a<tool_call>") <= problem.position <= len(f"a<tool_call>{inside}")
    assert following == ToolCall("g", {})


def test_hermes_string_without_an_end_does_not_swallow_the_next_call() -> None:
    text = '<tool_call>{"name": "f</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    problem, following = tool_format("hermes").parse(text).calls
    assert isinstance(problem, CallProblem)
    assert problem.trouble is Trouble.NOT_JSON
    assert following == ToolCall("g", {})


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "parameters": {"x": 1}}',
        '\n {"name": "f", "parameters": {"x": 1}}\n',
        '<|python_tag|>{"name": "f", "parameters": {"x": 1}}',
        '{"type": "function", "name": "f", "parameters": {"x": 1}}',
        '{"name": "f", "arguments": {"x": 1}}',
    ],
)
def test_llama_calls_are_the_whole_answer(text: str) -> None:
    assert tool_format("llama3").parse(text) == ParsedAnswer("", (ToolCall("f", {"x": 1}),))


def test_llama_writes_several_calls_with_semicolons_and_text_before_the_tag() -> None:
    several = '{"name": "f", "parameters": {"x": ";"}};{"name": "g", "parameters": {}}'
    expected = (ToolCall("f", {"x": ";"}), ToolCall("g", {}))
    assert tool_format("llama3").parse(several) == ParsedAnswer("", expected)
    assert tool_format("llama3").parse(f"Let me see.<|python_tag|>{several}") == ParsedAnswer(
        "Let me see.", expected
    )


@pytest.mark.parametrize(
    ("text", "trouble", "position"),
    [
        ("<|python_tag|>print(1)", Trouble.NOT_JSON, 14),
        ("<|python_tag|>", Trouble.NOT_JSON, 14),
        ('{"name": "f", "parameters": {"x": 1}', Trouble.NOT_JSON, 36),
        ('{"name": "f", "parameters": 3}', Trouble.BAD_ARGUMENTS, 0),
        ('{"name": "f", "parameters": {}, "arguments": {}}', Trouble.BAD_ARGUMENTS, 0),
    ],
)
def test_llama_calls_that_cannot_be_read_are_told(text: str, trouble: Trouble, position: int) -> None:
    (problem,) = tool_format("llama3").parse(text).calls
    assert isinstance(problem, CallProblem)
    assert (problem.trouble, problem.position) == (trouble, position)


@pytest.mark.parametrize("around", ["{}", "```\n{}\n```", "```json\n{}\n```\n", " ```json\n{}```"])
def test_plain_json_may_stand_in_a_fence(around: str) -> None:
    for text, expected in [
        ('{"name": "f", "arguments": {"x": "```"}}', (ToolCall("f", {"x": "```"}),)),
        (
            '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
            (ToolCall("f", {}), ToolCall("g", {})),
        ),
    ]:
        assert tool_format("json").parse(around.replace("{}", text)) == ParsedAnswer("", expected)


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ('[{"name": "f", "arguments": {}}', Trouble.UNCLOSED),
        ('[{"name": "f", "arguments": {}}] and more', Trouble.NOT_JSON),
        ('[{"name": "f", "arguments": {}}, 3]', Trouble.NOT_A_CALL),
        ('[{"name": "f", "arguments": {}} oh', Trouble.NOT_JSON),
    ],
)
def test_plain_json_tells_of_what_follows_a_call(text: str, trouble: Trouble) -> None:
    call, problem = tool_format("json").parse(text).calls
    assert call == ToolCall("f", {})
    assert isinstance(problem, CallProblem)
    assert problem.trouble is trouble


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UsageError, match="tool format 'xml' is unknown; accepted: hermes, llama3, json"):
        tool_format("xml")
