"""Tools in prompts and results after turns, by the templates of model families or without their help."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from envs.protocol import Action, Message, Observation
from opentinker_core.agents.tools.calculator import Calculator
from opentinker_core.agents.tools.formats import ToolCall, ToolDeclaration, tool_format
from opentinker_core.agents.tools.protocol import Toolbox
from opentinker_core.errors import UsageError
from opentinker_core.models.loading import load_tokenizer
from opentinker_core.models.renderer import Renderer
from opentinker_core.models.source import ModelSource
from tests.models.templates import (
    CHATML,
    GEMMA,
    HERMES,
    LLAMA31,
    MISTRAL,
    QWEN3,
    QWEN25,
    SPECIAL_TOKENS,
)

TOOLS = Toolbox([Calculator()]).declarations
QUESTION = Observation.user("2+2")
RESULTS = Observation((Message("tool", '"4"'), Message("tool", "5")))

Make = Callable[..., Renderer]


@pytest.fixture(scope="module")
def special_tokenizer(tiny_tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
    tokenizer.bos_token = "<pad>"
    return tokenizer


@pytest.fixture
def make(special_tokenizer: Any) -> Make:
    def made(template: Any, wire: str | None = None, mode: Any = "chat") -> Renderer:
        tokenizer = copy.copy(special_tokenizer)
        tokenizer.chat_template = template
        return Renderer(tokenizer, mode, tool_format(wire) if wire else None)

    return made


@pytest.fixture
def decode(special_tokenizer: Any) -> Callable[[list[int]], str]:
    return lambda ids: special_tokenizer.decode(ids, skip_special_tokens=False)


def after_a_call(renderer: Renderer, observation: Observation = RESULTS) -> list[int]:
    return renderer.following(observation, renderer.demonstration(Action("x")))


@pytest.mark.parametrize(
    ("template", "wire", "begins"),
    [
        (QWEN25, "hermes", "<|im_start|>system\nYou are Qwen.\n\n# Tools\n\nYou may call one or more"),
        (QWEN3, "hermes", "<|im_start|>system\n# Tools\n\nYou may call one or more"),
        (
            LLAMA31,
            "llama3",
            "<pad><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\nToday Date: "
            "01 Jan 2025\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nGiven the following",
        ),
        (HERMES, "hermes", "<|im_start|>system\nYou are a function calling AI model.\n<tools>\n"),
    ],
    ids=["qwen25", "qwen3", "llama31", "hermes"],
)
def test_templates_that_know_tools_tell_of_them(
    make: Make, decode: Any, template: str, wire: str, begins: str
) -> None:
    renderer = make(template, wire)
    told = decode(renderer.initial(QUESTION, TOOLS))
    assert told.startswith(begins)
    assert told.count('"name": "calculator"') == 1
    assert "calculator" not in decode(renderer.initial(QUESTION))


def test_templates_that_know_no_tools_get_the_words_of_the_format(make: Make, decode: Any) -> None:
    words = tool_format("json").declare(TOOLS)
    told = decode(make(CHATML, "json").initial(QUESTION, TOOLS))
    assert told == (
        f"<|im_start|>system\n{words}<|im_end|>\n<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"
    )
    ruled = Observation((Message("system", "Add."), *QUESTION.messages))
    assert f"system\nAdd.\n\n{words}<|im_end|>" in decode(make(CHATML, "json").initial(ruled, TOOLS))


def test_they_stand_with_the_user_where_there_is_no_system(make: Make, decode: Any) -> None:
    words = tool_format("json").declare(TOOLS)
    told = decode(make(GEMMA, "json").initial(QUESTION, TOOLS))
    assert told == f"<pad><|im_start|>user\n{words}\n\n2+2<|im_end|>\n<|im_start|>model\n"


def test_llama_is_told_in_the_first_message_of_the_user(make: Make, decode: Any) -> None:
    observation = Observation((Message("system", "Add."), *QUESTION.messages))
    told = decode(make(CHATML, "llama3").initial(observation, TOOLS))
    assert told.startswith(
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\nGiven the following functions"
    )
    assert told.endswith("}\n\n2+2<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(("template", "wire"), [(LLAMA31, "hermes"), (MISTRAL, "json"), (QWEN25, "json")])
def test_a_template_of_another_format_does_not_tell_of_the_tools_itself(
    make: Make, decode: Any, template: str, wire: str
) -> None:
    told = decode(make(template, wire).initial(QUESTION, TOOLS))
    assert "".join(tool_format(wire).declare(TOOLS).split()) in "".join(told.split())
    assert told.count('"calculator"') == 1
    assert "[AVAILABLE_TOOLS]" not in told
    assert "ipython" not in told


@pytest.mark.parametrize(
    ("template", "wire", "expected"),
    [
        (
            QWEN25,
            "hermes",
            '\n<|im_start|>user\n<tool_response>\n"4"\n</tool_response>\n<tool_response>\n5\n</tool_response>'
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            QWEN3,
            "hermes",
            '\n<|im_start|>user\n<tool_response>\n"4"\n</tool_response>\n<tool_response>\n5\n</tool_response>'
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            HERMES,
            "hermes",
            '\n<|im_start|>tool\n<tool_response>\n"4"\n</tool_response>\n<tool_response>\n5\n</tool_response>'
            "<|im_end|><|im_start|>assistant\n",
        ),
        (
            LLAMA31,
            "llama3",
            '<|start_header_id|>ipython<|end_header_id|>\n\n"\\"4\\""<|eot_id|>'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"5"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            CHATML,
            "json",
            '\n<|im_start|>tool\n"4"<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n',
        ),
        (GEMMA, "json", '\n<|im_start|>user\n=> "4"\n=> 5<|im_end|>\n<|im_start|>model\n'),
        (
            GEMMA,
            "hermes",
            '\n<|im_start|>user\n<tool_response>\n"4"\n</tool_response>\n<tool_response>\n5\n</tool_response>'
            "<|im_end|>\n<|im_start|>model\n",
        ),
        (MISTRAL, "json", '[INST] => "4"\n=> 5[/INST]'),
    ],
    ids=["qwen25", "qwen3", "hermes", "llama31", "chatml", "gemma json", "gemma hermes", "mistral"],
)
def test_results_follow_a_turn(make: Make, decode: Any, template: str, wire: str, expected: str) -> None:
    assert decode(after_a_call(make(template, wire))) == expected


def test_of_two_templates_the_one_for_tools_is_taken_if_there_are_tools(make: Make, decode: Any) -> None:
    both = {"default": CHATML, "tool_use": HERMES}
    assert "function calling AI" in decode(make(both, "hermes").initial(QUESTION, TOOLS))
    assert "<tool_response>" in decode(after_a_call(make(both, "hermes")))
    assert "Be kind." in decode(make(both).initial(QUESTION))


def test_a_turn_of_llama_may_end_with_its_end_of_call(make: Make, decode: Any) -> None:
    renderer = make(LLAMA31, "llama3")
    end_of_turn, _, end_of_call = renderer.stop_token_ids
    assert decode([end_of_turn, end_of_call]) == "<|eot_id|><|eom_id|>"
    turn = renderer.demonstration(Action("x"))
    assert renderer.following(RESULTS, [*turn[:-1], end_of_call]) == renderer.following(RESULTS, turn)
    assert renderer.following(RESULTS, turn[:-1])[0] == end_of_turn
    assert end_of_call not in make(LLAMA31).stop_token_ids


def test_plain_text_has_the_words_before_it_and_results_on_lines(make: Make, decode: Any) -> None:
    renderer = make(None, "json", "plain")
    assert decode(renderer.initial(QUESTION, TOOLS)) == tool_format("json").declare(TOOLS) + "\n\n2+2"
    assert decode(renderer.initial(QUESTION)) == "2+2"
    mixed = Observation((*RESULTS.messages, Message("user", "And "), Message("user", "3+3")))
    assert decode(renderer.following(mixed, [5])) == '\n=> "4"\n=> 5\nAnd 3+3'
    assert decode(make(None, None, "plain").following(mixed, [5])) == '"4"5And 3+3'
    assert decode(make(None, "hermes", "plain").following(Observation(RESULTS.messages[1:]), [5])) == (
        "\n<tool_response>\n5\n</tool_response>\n"
    )


def test_tools_that_a_template_refuses_are_named(make: Make) -> None:
    picky = "{%- if tools and not tools[0].function.parameters.properties %}{{- raise_exception('empty') }}"
    renderer = make(QWEN25.replace("{%- if tools %}", picky + "{%- endif %}{%- if tools %}", 1), "hermes")
    empty = ToolDeclaration("clock", "Tells the time.", {"type": "object", "properties": {}})
    with pytest.raises(UsageError, match="refuses messages of roles user and the tools clock: empty"):
        renderer.initial(QUESTION, [empty])


def test_tools_need_a_format(make: Make) -> None:
    for renderer in (make(CHATML), make(QWEN25), make(None, None, "plain")):
        with pytest.raises(UsageError, match="tools are declared without a format; accepted: hermes, llama3"):
            renderer.initial(QUESTION, TOOLS)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (CHATML, None),
        (QWEN25, None),
        (HERMES, None),
        (QWEN3, "it drops the reasoning of earlier turns"),
        (LLAMA31, "it strips blanks around answers"),
        (GEMMA, "it strips blanks around answers"),
        (MISTRAL, "it writes an answer in another way than it stands after its prompt"),
        (
            CHATML.replace("assistant\\n", "assistant\\n<think>\\n").replace(
                "m.content +", "m.content.split('</think>')[-1] +"
            ),
            "it drops the reasoning of earlier turns",
        ),
        (
            CHATML.replace("m.content +", "m.content|replace('</think>\\n\\n', '</think>\\n') +"),
            "it changes the reasoning of earlier turns",
        ),
    ],
    ids=["chatml", "qwen25", "hermes", "qwen3", "llama31", "gemma", "mistral", "deepseek", "reformatted"],
)
def test_whether_a_template_rewrites_what_was_recorded(make: Make, template: str, reason: str | None) -> None:
    assert make(template).rewrites_history == reason


@pytest.mark.parametrize(
    ("template", "wire", "reason"),
    [
        (QWEN25, "hermes", None),
        (CHATML, "json", None),
        (HERMES, "hermes", "it writes results of tools in another way once more follows"),
    ],
    ids=["qwen25", "chatml", "hermes"],
)
def test_whether_a_template_rewrites_results(
    make: Make, template: str, wire: str, reason: str | None
) -> None:
    assert make(template, wire).rewrites_history == reason


def test_plain_text_is_never_rewritten_and_never_rendered_as_a_whole(make: Make) -> None:
    renderer = make(None, None, "plain")
    assert renderer.rewrites_history is None
    with pytest.raises(UsageError, match="renders no whole conversations; accepted: chat"):
        renderer.whole(QUESTION.messages)


def test_a_whole_conversation_as_qwen3_writes_it_when_a_new_question_comes(make: Make, decode: Any) -> None:
    renderer = make(QWEN3, "hermes")
    said = "<think>\nso\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    messages = [*QUESTION.messages, Message("assistant", said), *RESULTS.messages]
    assert f"assistant\n{said}<|im_end|>" in decode(renderer.whole(messages, TOOLS))
    later = [*messages, Message("assistant", "4"), Message("user", "3+3")]
    whole = decode(renderer.whole(later, TOOLS))
    assert "so" not in whole.partition("<|im_start|>user")[2]
    assert whole.startswith("<|im_start|>system\n# Tools")
    assert whole.endswith("<|im_start|>user\n3+3<|im_end|>\n<|im_start|>assistant\n")


def test_declarations_are_not_kept_from_one_prompt_to_the_next(make: Make, decode: Any) -> None:
    renderer = make(QWEN25, "hermes")
    other = ToolDeclaration("clock", "Tells the time.", {"type": "object", "properties": {}})
    assert "clock" in decode(renderer.initial(QUESTION, [other]))
    assert "clock" not in decode(renderer.initial(QUESTION, TOOLS))


@pytest.mark.pretrained
def test_smollm2_calls_a_tool_token_by_token(smollm2: ModelSource) -> None:
    tokenizer = load_tokenizer(smollm2)
    wire = tool_format("json")
    renderer = Renderer(tokenizer, "chat", wire)
    call = renderer.demonstration(Action(wire.render([ToolCall("calculator", {"expression": "2+2"})])))
    last = renderer.demonstration(Action("It is 4."))
    pieces = [renderer.initial(QUESTION, TOOLS), call, renderer.following(RESULTS, call), last]
    told = wire.declare(TOOLS)
    whole: Any = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": told},
            {"role": "user", "content": "2+2"},
            {"role": "assistant", "content": '{"name": "calculator", "arguments": {"expression": "2+2"}}'},
            *({"role": "tool", "content": message.content} for message in RESULTS.messages),
            {"role": "assistant", "content": "It is 4."},
        ],
        tokenize=False,
    )
    assert tokenizer.decode([token for piece in pieces for token in piece]) + "\n" == whole
    assert renderer.rewrites_history is None
