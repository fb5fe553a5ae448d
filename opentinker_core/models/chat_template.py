"""A model's chat template as text: a first prompt, what follows a turn, tools and their results.

Templates are programs of third parties. What they do with tools is tried, not presumed: those that show
a tool, or a message of the role `tool`, get them; for the others, the tools' format writes both.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from envs.protocol import Message
from opentinker_core.agents.tools.formats import ToolDeclaration, ToolFormat, format_of_template
from opentinker_core.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DATE = "01 Jan 2025"
"""What templates that ask for a `date_string` are given: a run must not depend on the day."""

_MARK = "opentinker:mark"
_ASKED = Message("user", "?")
_PROBE = ToolDeclaration(_MARK, "?", {"type": "object", "properties": {"x": {"type": "string"}}})


class ChatTemplate:
    """The template of a tokenizer; `wire`: the format of the agent's tools, if it has any."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", wire: ToolFormat | None) -> None:
        """Of a tokenizer with several templates, take the one for tools if there are tools."""
        self._tokenizer, self._wire = tokenizer, wire
        self.source: str = tokenizer.get_chat_template(tools=[] if wire else None)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolDeclaration] = ()) -> str:
        """A conversation up to where the agent begins to speak; `tools`: what it is told of."""
        if self._wire is None or not tools or self._knows_tools:
            return self._render(self._with_results(messages), generation_prompt=True, tools=tools)
        declared = self._declared(messages, self._wire, self._wire.declare(tools).rstrip())
        return self._render(self._with_results(declared), generation_prompt=True)

    def after_a_turn(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """What the template writes after an assistant's message that is followed by `messages`.

        The message is a mark whose text is then looked for; the user's turn before it keeps
        templates content that demand alternation, and takes the default system prompt.

        Raises:
            UsageError: the template shows an assistant's message not at all, or twice.
        """
        mark = _MARK
        while any(mark in message.content for message in messages):
            mark += ":"
        dialogue = (_ASKED, Message("assistant", mark), *self._with_results(messages))
        before, found, after = self._render(dialogue, generation_prompt=generation_prompt).partition(mark)
        if not before or not found or mark in after:
            raise UsageError(
                "render: the base model's chat template does not show an assistant's message once"
            )
        return after

    @cached_property
    def rewrites_history(self) -> str | None:
        """Why a whole conversation is not its first prompt with turns and what followed them; None: it is."""
        thoughts = [f"{opening}{_MARK}\n</think>\n\n4" for opening in ("<think>\n", "")]
        if any(_MARK not in self._again(thought)[0] for thought in thoughts):
            return "it drops the reasoning of earlier turns"
        for said, reason in (
            ("4", "it writes an answer in another way than it stands after its prompt"),
            *((thought, "it changes the reasoning of earlier turns") for thought in thoughts),
            ("\n 4 \n", "it strips blanks around answers"),
        ):
            again, recorded = self._again(said)
            if again != recorded:
                return reason
        results = [Message("tool", "4"), Message("tool", "5")] if self._wire else []
        again, recorded = self._again("4", results)
        return "it writes results of tools in another way once more follows" if again != recorded else None

    def _again(self, said: str, shown: Sequence[Message] = ()) -> tuple[str, str]:
        """A conversation in which this is said (after `shown`, again): as written now, and as recorded."""
        turn, recorded, whole = Message("assistant", said), self.prompt([_ASKED]), [_ASKED]
        for messages in (shown, [Message("user", "!")]):
            if messages:
                recorded += said + self.after_a_turn(messages, generation_prompt=True)
                whole += [turn, *messages]
        return self.prompt(whole), recorded

    @cached_property
    def _knows_tools(self) -> bool:
        """Whether it tells the model of tools, and in the format in which calls are then read."""
        if self._wire is None or format_of_template(self.source) != self._wire.name:
            return False
        return self._shows((_ASKED,), (_PROBE,))

    @cached_property
    def _knows_results(self) -> bool:
        return self._shows((_ASKED, Message("assistant", "!"), Message("tool", _MARK)))

    @cached_property
    def _knows_system(self) -> bool:
        return self._shows((Message("system", _MARK), _ASKED))

    def _shows(self, messages: Sequence[Message], tools: Sequence[ToolDeclaration] = ()) -> bool:
        """Whether the mark in them is there afterwards."""
        try:
            return _MARK in self._render(messages, generation_prompt=False, tools=tools)
        except UsageError:
            return False

    def _declared(self, given: Sequence[Message], wire: ToolFormat, text: str) -> list[Message]:
        """With the format's own words about the tools, in the message where they belong."""
        messages = list(given)
        if wire.declared_to == "system" and self._knows_system:
            if not messages or messages[0].role != "system":
                return [Message("system", text), *messages]
            messages[0] = replace(messages[0], content=f"{messages[0].content}\n\n{text}")
            return messages
        first = next((index for index, one in enumerate(messages) if one.role == "user"), None)
        if first is None:
            return [*messages, Message("user", text)]
        messages[first] = replace(messages[first], content=f"{text}\n\n{messages[first].content}")
        return messages

    def _with_results(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Results in the user's messages, where the template has no role for them."""
        if self._wire is None or self._knows_results:
            return messages
        shown: list[Message] = []
        for are_results, group in groupby(messages, lambda message: message.role == "tool"):
            some = list(group)
            results = [message.content for message in some]
            shown += [Message("user", self._wire.respond(results))] if are_results else some
        return shown

    def _render(
        self, messages: Sequence[Message], *, generation_prompt: bool, tools: Sequence[ToolDeclaration] = ()
    ) -> str:
        from jinja2 import TemplateError

        dialogue = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                dialogue,
                tools=[tool.as_function() for tool in tools] or None,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                date_string=_DATE,
            )
        except TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            told = f" and the tools {', '.join(tool.name for tool in tools)}" if tools else ""
            raise UsageError(
                f"render: the chat template refuses messages of roles {roles}{told}: {error}"
            ) from error
        return str(text)
