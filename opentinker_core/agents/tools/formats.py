"""Function calling in the models' own formats: what they are told of tools, and what they write to call one.

`hermes`  Hermes, Qwen 2.5 and 3: any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
`llama3`  Llama 3.1 to 3.3: the whole answer is `{"name": ..., "parameters": {...}}`, or begins so after
          `<|python_tag|>`; several are divided by semicolons
`json`    any model: the whole answer is `{"name": ..., "arguments": {...}}`, or a list of those, or either
          in a fence

Results are told by the model's chat template; `respond` is for templates that know none, and for plain text.

What cannot be read is a value, `CallProblem`, in the place where the call would be. JSON is read
strictly (no NaN, no name twice), so that a call that was read can be written again as it was.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol

from opentinker_core.errors import UsageError


@dataclass(frozen=True)
class ToolDeclaration:
    """What a model is told of a tool; `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def as_function(self) -> dict[str, Any]:
        """The form that chat templates and OpenAI's API take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """A call that was understood; whether the tool exists and takes these arguments is not known yet."""

    name: str
    arguments: Mapping[str, Any]


class Trouble(StrEnum):
    """What is wrong with a call."""

    NOT_JSON = "not_json"
    UNCLOSED = "unclosed"
    NOT_A_CALL = "not_a_call"
    NO_NAME = "no_name"
    BAD_ARGUMENTS = "bad_arguments"


@dataclass(frozen=True)
class CallProblem:
    """A call that cannot be read: why, and at which character of the answer."""

    trouble: Trouble
    message: str
    position: int

    def __str__(self) -> str:
        return f"{self.message} (at character {self.position})"


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer taken apart: the text that is no call, stripped, and the calls in their order."""

    content: str
    calls: tuple[ToolCall | CallProblem, ...]


class ToolFormat(Protocol):
    """How a family of models is told of tools, and calls them."""

    @property
    def name(self) -> str:
        """What configs call it."""
        ...

    @property
    def declared_to(self) -> Literal["system", "user"]:
        """In whose message `declare` stands: that of the system, or the first of the user."""
        ...

    def declare(self, tools: Sequence[ToolDeclaration]) -> str:
        """Text for the first prompt, as models of it are trained on."""
        ...

    def respond(self, results: Sequence[str]) -> str:
        """Text of the results of a round of calls, in their order."""
        ...

    def render(self, calls: Sequence[ToolCall]) -> str:
        """What a model of the family writes for these calls; nothing for none.

        Raises:
            ValueError: an argument is not finite, or an integer of more digits than Python writes.
            TypeError: an argument has no form in JSON.
        """
        ...

    def parse(self, text: str) -> ParsedAnswer:
        """Take an answer apart (the text after the reasoning, without the end of turn); never raises."""
        ...


def tool_format(name: str) -> ToolFormat:
    """The format of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in _FORMATS:
        raise UsageError(f"tool format {name!r:.80} is unknown; accepted: {', '.join(_FORMATS)}")
    return _FORMATS[name]


def format_of_template(template: str) -> str | None:
    """The format in which a chat template (its source) writes calls; None: it knows no tools, or another."""
    source = template.replace('\\"', '"')
    if "<tool_call>" in source and '"arguments"' in source:
        return "hermes"
    if "<|python_tag|>" in source or "ipython" in source:
        return "llama3"
    return None


class Hermes:
    """JSON between tags. The closing tag may be missing at the very end, where a stop string cut it off."""

    name = "hermes"
    declared_to: Literal["system", "user"] = "system"
    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def declare(self, tools: Sequence[ToolDeclaration]) -> str:
        functions = "\n".join(_dump(tool.as_function()) for tool in tools)
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{functions}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            "<tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )

    def respond(self, results: Sequence[str]) -> str:
        return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{self._OPEN}\n{_written(call, 'arguments')}\n{self._CLOSE}" for call in calls)

    def parse(self, text: str) -> ParsedAnswer:
        content: list[str] = []
        calls: list[ToolCall | CallProblem] = []
        at = 0
        while (found := text.find(self._OPEN, at)) >= 0:
            content.append(text[at:found])
            call, at = self._call(text, found + len(self._OPEN))
            calls.append(call)
        return ParsedAnswer("".join([*content, text[at:]]).strip(), tuple(calls))

    def _call(self, text: str, start: int) -> tuple[ToolCall | CallProblem, int]:
        """The call whose JSON begins at `start`, and where the text goes on after its closing tag.

        The tag is looked for after the JSON: a string in it may hold the very same characters.
        """
        value, end = _read(text, start, ("arguments",))
        if isinstance(value, ToolCall):
            end = _skip(text, end)
            if end == len(text) or text.startswith(self._CLOSE, end):
                return value, min(end + len(self._CLOSE), len(text))
            message = f"expected {self._CLOSE} after the JSON object, found {text[end : end + 20]!r}"
            value = CallProblem(Trouble.UNCLOSED, message, end)
        broken = value.trouble is Trouble.NOT_JSON  # then a string that never ends may have run past the tag
        closing = text.find(self._CLOSE, start if broken else end)
        return value, len(text) if closing < 0 else closing + len(self._CLOSE)


class Llama3:
    """JSON as the whole answer. Llama 3 writes no mark around it, so text that is no call is an answer."""

    name = "llama3"
    declared_to: Literal["system", "user"] = "user"
    _TAG = "<|python_tag|>"

    def declare(self, tools: Sequence[ToolDeclaration]) -> str:
        functions = "".join(_dump(tool.as_function(), indent=4) + "\n\n" for tool in tools)
        return (
            "Given the following functions, please respond with a JSON for a function call "
            "with its proper arguments that best answers the given prompt.\n\n"
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its '
            f"value}}. Do not use variables.\n\n{functions}"
        )

    def respond(self, results: Sequence[str]) -> str:
        return _arrows(results)

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(_written(call, "parameters") for call in calls)

    def parse(self, text: str) -> ParsedAnswer:
        before, tag, _ = text.partition(self._TAG)
        if not before.lstrip().startswith("{") and tag:
            calls = _series(text, len(before) + len(tag), ("parameters", "arguments"), ";")
            return ParsedAnswer(before.strip(), tuple(calls))
        if not _looks_like_calls(text, 0, "{"):
            return ParsedAnswer(text.strip(), ())
        return ParsedAnswer("", tuple(_series(text, 0, ("parameters", "arguments"), ";")))


class PlainJson:
    """JSON as the whole answer, for models without a format of their own."""

    name = "json"
    declared_to: Literal["system", "user"] = "system"
    _FENCE = "```"

    def declare(self, tools: Sequence[ToolDeclaration]) -> str:
        functions = "\n".join(_dump(tool.as_function()["function"]) for tool in tools)
        return (
            f"You can call these functions:\n{functions}\n\n"
            'To call one, answer with nothing but {"name": <function name>, "arguments": <JSON object>}; '
            "to call several, with a JSON list of such objects."
        )

    def respond(self, results: Sequence[str]) -> str:
        return _arrows(results)

    def render(self, calls: Sequence[ToolCall]) -> str:
        written = [_written(call, "arguments") for call in calls]
        return written[0] if len(written) == 1 else f"[{', '.join(written)}]" if written else ""

    def parse(self, text: str) -> ParsedAnswer:
        start, end = self._unfenced(text)
        inside = text[:end]  # positions stay those of the answer
        if not _looks_like_calls(inside, start, "{["):
            return ParsedAnswer(text.strip(), ())
        if not inside.startswith("[", start):
            return ParsedAnswer("", tuple(_series(inside, start, ("arguments",), ",")))
        return ParsedAnswer("", tuple(self._listed(inside, start)))

    def _unfenced(self, text: str) -> tuple[int, int]:
        """Where the answer begins and ends, without a fence of three backticks around all of it."""
        start, end = _skip(text, 0), len(text.rstrip())
        if text.startswith(self._FENCE, start) and text.endswith(self._FENCE, start + 3, end):
            opening, newline, _ = text[start + 3 : end - 3].partition("\n")
            if newline and opening.strip() in ("", "json"):
                return _skip(text, start + 3 + len(opening) + 1), end - 3
        return start, end

    def _listed(self, text: str, start: int) -> list[ToolCall | CallProblem]:
        calls = _series(text, start + 1, ("arguments",), ",", closing="]")
        return calls or [CallProblem(Trouble.NOT_A_CALL, "the list holds no call", start)]


_FORMATS: Mapping[str, ToolFormat] = {wire.name: wire for wire in (Hermes(), Llama3(), PlainJson())}


def _arrows(results: Sequence[str]) -> str:
    return "\n".join(f"=> {result}" for result in results)


def _looks_like_calls(text: str, start: int, openings: str) -> bool:
    """An object or a list that names something was meant as a call, even if it then cannot be read."""
    return text.startswith(tuple(openings), _skip(text, start)) and '"name"' in text


def _series(
    text: str, start: int, keys: tuple[str, ...], divider: str, closing: str = ""
) -> list[ToolCall | CallProblem]:
    """Calls one after the other, divided by blanks or `divider`, up to `closing` or the end of the text.

    They end with the first that cannot be read, since nothing marks where the next would begin.
    """
    calls: list[ToolCall | CallProblem] = []
    at = _skip(text, start)
    while at < len(text) and not (closing and text.startswith(closing, at)):
        value, at = _read(text, at, keys)
        calls.append(value)
        if isinstance(value, CallProblem) and value.trouble is Trouble.NOT_JSON:
            return calls
        at = _skip(text, at)
        if text.startswith(divider, at):
            at = _skip(text, at + len(divider))
    if closing:
        after = _skip(text, at + len(closing))
        if at >= len(text):
            calls.append(CallProblem(Trouble.UNCLOSED, f"expected {closing!r} after the calls", at))
        elif after < len(text):
            message = f"expected the end of the answer, found {text[after : after + 20]!r}"
            calls.append(CallProblem(Trouble.NOT_JSON, message, after))
    elif not calls:
        calls.append(CallProblem(Trouble.NOT_JSON, "expected a JSON object, found the end of the answer", at))
    return calls


def _read(text: str, start: int, keys: tuple[str, ...]) -> tuple[ToolCall | CallProblem, int]:
    """The call that is written at `start` as JSON, and where its text ends."""
    start = _skip(text, start)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return CallProblem(Trouble.NOT_JSON, f"not JSON: {error.msg}", error.pos), error.pos
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        return CallProblem(Trouble.NOT_JSON, f"not JSON: {what}", start), start
    return _call_of(value, start, keys), end


def _call_of(value: object, start: int, keys: tuple[str, ...]) -> ToolCall | CallProblem:
    if not isinstance(value, dict):
        message = f"expected a JSON object, found {_kind(value)}"
        return CallProblem(Trouble.NOT_A_CALL, message, start)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        message = f'"name": expected the name of a tool, found {_kind(name) if "name" in value else "none"}'
        return CallProblem(Trouble.NO_NAME, message, start)
    if unknown := value.keys() - {"name", "id", "type", *keys}:
        message = f'{min(unknown)!r:.80} is unknown beside "name"; accepted: "{keys[0]}"'
        return CallProblem(Trouble.BAD_ARGUMENTS, message, start)
    given = [key for key in keys if key in value]
    if len(given) != 1 or not isinstance(value[given[0]], dict):
        found = _kind(value[given[0]]) if len(given) == 1 else "none" if not given else "several"
        return CallProblem(
            Trouble.BAD_ARGUMENTS, f'"{keys[0]}": expected a JSON object, found {found}', start
        )
    try:
        _dump(value).encode()
    except (UnicodeEncodeError, RecursionError, ValueError):
        return CallProblem(Trouble.NOT_JSON, "not JSON: a lone surrogate, or nested too deeply", start)
    return ToolCall(name, value[given[0]])


def _kind(value: object) -> str:
    for kind, word in ((dict, "an object"), (list, "a list"), (str, "a string"), (bool, "true or false")):
        if isinstance(value, kind):
            return word
    return "null" if value is None else "a number"


def _written(call: ToolCall, key: str) -> str:
    return _dump({"name": call.name, key: dict(call.arguments)})


def _dump(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)


def _skip(text: str, at: int) -> int:
    """The place of the next character that is no blank."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name is there twice in an object")
    return value


def _constant(word: str) -> Any:
    raise ValueError(f"{word} is no value of JSON")


def _float(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise ValueError(f"the number {word:.40} is too large")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float)
