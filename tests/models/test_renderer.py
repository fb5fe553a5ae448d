import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from envs.protocol import Action, Message, Observation
from opentinker_core.errors import UsageError
from opentinker_core.models.renderer import Renderer

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|start|>system\nBe kind.<|end|>\n' }}{% endif %}"
    "{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' <eos>' }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'assistant') != (loop.index0 % 2 == 1) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|start|>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>model\n' }}{% endif %}"
)
THINKING = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m.content.split('</think>')[-1].strip() if m.role == 'assistant' else m.content }}{{ '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
OWN = None  # the tiny model's own template
FAITHFUL = {"own": OWN, "chatml": CHATML, "alternating": ALTERNATING}
"""Templates that write every message as it is: rendering the whole dialogue again is an oracle."""

TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="<") | st.just("\n"))


def with_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> PreTrainedTokenizerBase:
    other = copy.deepcopy(tokenizer)
    if template is not None:
        other.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
        other.chat_template = template
    return other


@pytest.fixture(scope="module", params=FAITHFUL)
def faithful(request: pytest.FixtureRequest, tiny_tokenizer: PreTrainedTokenizerBase) -> Any:
    return with_template(tiny_tokenizer, FAITHFUL[request.param])


def dialogue(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": "assistant" if index % 2 else "user", "content": content}
        for index, content in enumerate(contents)
    ]


@settings(deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=4), answers=st.lists(TEXT, min_size=3, max_size=3))
def test_recorded_tokens_are_those_of_the_whole_dialogue(
    faithful: Any, texts: list[str], answers: list[str]
) -> None:
    renderer = Renderer(faithful, "chat")
    tokens, said = renderer.initial(Observation.user(texts[0])), [texts[0]]
    for text, answer in zip(texts[1:], answers, strict=False):
        turn = renderer.demonstration(Action(answer))
        tokens += turn + renderer.following(Observation.user(text), turn)
        said += [answer, text]
    whole = faithful.apply_chat_template(dialogue(*said), tokenize=False, add_generation_prompt=True)
    assert tokens == faithful.encode(whole, add_special_tokens=False)


@settings(deadline=None)
@given(text=TEXT, answer=TEXT)
def test_a_turn_cut_short_is_closed_by_the_context(faithful: Any, text: str, answer: str) -> None:
    renderer = Renderer(faithful, "chat")
    complete = renderer.demonstration(Action(answer))
    closed = renderer.following(Observation.user(text), complete)
    assert renderer.following(Observation.user(text), complete[:-1]) == [complete[-1], *closed]


def test_default_system_prompt_is_inserted_only_once(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    renderer = Renderer(with_template(tiny_tokenizer, CHATML), "chat")
    turn = renderer.demonstration(Action("4"))
    tokens = (
        renderer.initial(Observation.user("2+2")) + turn + renderer.following(Observation.user("3+3"), turn)
    )
    assert with_template(tiny_tokenizer, CHATML).decode(tokens).count("Be kind.") == 1


def test_template_may_put_spaces_around_the_answer(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer = with_template(tiny_tokenizer, LLAMA2)
    renderer = Renderer(tokenizer, "chat")
    turn = renderer.demonstration(Action("4"))
    assert renderer.stop_token_ids == (tokenizer.eos_token_id,)
    assert tokenizer.decode(renderer.following(Observation.user("3+3"), turn)) == "[INST] 3+3 [/INST]"
    assert (
        tokenizer.decode(renderer.following(Observation.user("3+3"), turn[:-1])) == " <eos>[INST] 3+3 [/INST]"
    )


def test_template_that_drops_thoughts_does_not_touch_recorded_tokens(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer = with_template(tiny_tokenizer, THINKING)
    renderer = Renderer(tokenizer, "chat")
    turn = renderer.demonstration(Action("<think>hm</think> 4"))
    after = tokenizer.decode(renderer.following(Observation.user("3+3"), turn))
    assert after == "\n<|start|>user\n3+3<|end|>\n<|start|>assistant\n"


def test_stop_tokens_are_the_end_of_turn_and_the_end_of_sequence(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer = with_template(tiny_tokenizer, CHATML)
    end, eos = tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.eos_token_id
    assert Renderer(tokenizer, "chat").stop_token_ids == (end, eos)
    assert Renderer(tokenizer, "plain").stop_token_ids == (eos,)


def test_several_new_messages_and_none(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer = with_template(tiny_tokenizer, CHATML)
    renderer = Renderer(tokenizer, "chat")
    turn = renderer.demonstration(Action("4"))
    both = Observation((Message("tool", "out"), Message("user", "go on")))
    assert tokenizer.decode(renderer.following(both, turn)) == (
        "\n<|start|>tool\nout<|end|>\n<|start|>user\ngo on<|end|>\n<|start|>assistant\n"
    )
    assert tokenizer.decode(renderer.following(Observation(()), turn)) == "\n<|start|>assistant\n"


def test_observation_that_quotes_the_mark_is_rendered_whole(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer = with_template(tiny_tokenizer, CHATML)
    renderer = Renderer(tokenizer, "chat")
    text = "opentinker:turn: opentinker:turn"
    after = tokenizer.decode(renderer.following(Observation.user(text), renderer.demonstration(Action("4"))))
    assert after == f"\n<|start|>user\n{text}<|end|>\n<|start|>assistant\n"


def test_date_in_a_template_does_not_depend_on_the_day(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    today = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    template = today + "{{ date_string + '\n' }}" + str(tiny_tokenizer.chat_template)
    tokenizer = with_template(tiny_tokenizer, template)
    text = tokenizer.decode(Renderer(tokenizer, "chat").initial(Observation.user("Hi")))
    assert text == "01 Jan 2025\nuser\nHi<eos>\nassistant\n"


def test_roles_that_the_template_refuses_are_named(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    renderer = Renderer(with_template(tiny_tokenizer, ALTERNATING), "chat")
    with pytest.raises(UsageError, match="refuses messages of roles user, assistant, assistant: roles must"):
        renderer.following(Observation((Message("assistant", "x"),)), [5])


def test_template_that_hides_the_answer_is_refused(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    template = "{% for m in messages %}{{ m.role + '\n' }}{% endfor %}"
    with pytest.raises(UsageError, match="does not show an assistant's message"):
        Renderer(with_template(tiny_tokenizer, template), "chat")


@settings(deadline=None)
@given(first=TEXT, later=TEXT)
def test_plain_rendering_is_the_joined_text(
    tiny_tokenizer: PreTrainedTokenizerBase, first: str, later: str
) -> None:
    renderer = Renderer(tiny_tokenizer, "plain")
    observation = Observation((Message("system", first), Message("user", later)))
    assert tiny_tokenizer.decode(renderer.initial(observation)) == first + later
    assert renderer.following(observation, [5, 1]) == renderer.initial(observation)


@settings(deadline=None)
@given(text=TEXT)
def test_demonstration_reads_back_as_its_action(faithful: Any, text: str) -> None:
    for mode in ("plain", "chat"):
        renderer = Renderer(faithful, mode)
        tokens = renderer.demonstration(Action(text))
        assert tokens[-1] == renderer.stop_token_ids[0]
        assert not set(tokens[:-1]) & set(renderer.stop_token_ids)
        assert renderer.action_text(tokens, ()) == text


@pytest.mark.parametrize(
    ("text", "stop", "action"),
    [
        ("12\n3+4=", ("\n",), "12"),
        ("12", ("\n",), "12"),
        ("ab#c\n", ("\n", "#"), "ab"),
        ("\n", ("\n",), ""),
        ("", ("\n",), ""),
    ],
)
def test_action_ends_before_the_first_stop_string(
    tiny_tokenizer: PreTrainedTokenizerBase, text: str, stop: tuple[str, ...], action: str
) -> None:
    tokens = tiny_tokenizer.encode(text, add_special_tokens=False)
    assert Renderer(tiny_tokenizer, "plain").action_text(tokens, stop) == action


def test_only_a_stop_token_at_the_end_is_removed(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    renderer = Renderer(tiny_tokenizer, "plain")
    pad, eos = tiny_tokenizer.pad_token_id, tiny_tokenizer.eos_token_id
    assert renderer.action_text([pad, eos], ()) == "<pad>"
    assert renderer.action_text([eos], ()) == ""
    assert renderer.action_text([], ()) == ""


def test_impossible_renderers_are_refused(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UsageError, match="accepted: plain, chat"):
        Renderer(tiny_tokenizer, "markdown")  # type: ignore[arg-type]
    bare = copy.deepcopy(tiny_tokenizer)
    bare.chat_template = None
    with pytest.raises(UsageError, match="no chat template; accepted: plain"):
        Renderer(bare, "chat")
    bare.eos_token = None
    with pytest.raises(UsageError, match="no end-of-sequence token"):
        Renderer(bare, "plain")


def test_text_that_is_no_unicode_is_refused_by_name(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UsageError, match="lone surrogate"):
        Renderer(tiny_tokenizer, "plain").initial(Observation.user("caf\udce9"))
