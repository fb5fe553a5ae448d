"""Observations to tokens, tokens to actions. What was recorded is never rendered or encoded again."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from envs.protocol import Action, Message, Observation
from opentinker_core.errors import UsageError
from opentinker_core.models.chat_template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from opentinker_core.agents.tools.formats import ToolDeclaration, ToolFormat

_END_OF_CALL = "<|eom_id|>"
"""With what Llama 3 may end a turn whose calls it wants answered."""
_TEXTS = 128
"""Whose tokens are kept: the members of a group are shown the same, one after the other."""


class Renderer:
    """Turns messages into tokens, as plain text or with the model's chat template."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        mode: Literal["plain", "chat"],
        wire: "ToolFormat | None" = None,
    ) -> None:
        """Bind a tokenizer, and the format of the agent's tools if it has any.

        Raises:
            UsageError: the mode is unknown, or the tokenizer has no chat template or no stop token.
        """
        if mode not in ("plain", "chat"):
            raise UsageError(f"render: {mode!r} is unknown; accepted: plain, chat")
        if mode == "chat" and not tokenizer.chat_template:
            raise UsageError("render: the base model has no chat template; accepted: plain")
        self._tokenizer, self._wire = tokenizer, wire
        self._template = ChatTemplate(tokenizer, wire) if mode == "chat" else None
        self._tokens = lru_cache(_TEXTS)(self._tokenized)
        if not self.stop_token_ids:
            raise UsageError("base_model: the tokenizer has no end-of-sequence token")

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn: the template's end of turn (chat) first, then the end of sequence."""
        ends = (self._end_of_turn, self._tokenizer.eos_token_id, self._end_of_call)
        return tuple(dict.fromkeys(token for token in ends if token is not None))

    @property
    def rewrites_history(self) -> str | None:
        """Why the template, given the whole conversation, does not give what was recorded; None: it does."""
        return self._template.rewrites_history if self._template else None

    def initial(self, observation: Observation, tools: "Sequence[ToolDeclaration]" = ()) -> list[int]:
        """Tokens of an episode's first prompt, up to where the agent begins to speak.

        `tools`: what it is told of. The template tells it, if it knows tools of their format; else the
        format's own words stand in the system's message or the first of the user, or before plain text.

        Raises:
            UsageError: there are tools, but no format; or the template refuses the messages or the tools.
        """
        if tools and self._wire is None:
            raise UsageError("render: tools are declared without a format; accepted: hermes, llama3, json")
        if self._template:
            return self._encode(self._template.prompt(observation.messages, tools))
        told = f"{self._wire.declare(tools).rstrip()}\n\n" if tools and self._wire else ""
        return self._encode(told + self._plain(observation))

    def following(self, observation: Observation, generated: Sequence[int]) -> list[int]:
        """Only the tokens to append after the recorded ids, which end with the turn `generated`.

        With a chat template they close the agent's turn, unless it closed it itself.
        """
        if not self._template:
            return self._encode(self._plain(observation))
        tokens = self._encode(self._template.after_a_turn(observation.messages, generation_prompt=True))
        if generated and self._end_of_turn is not None and generated[-1] in self._ends_of_turns:
            return tokens[tokens.index(self._end_of_turn) + 1 :]
        return tokens

    def whole(self, messages: Sequence[Message], tools: "Sequence[ToolDeclaration]" = ()) -> list[int]:
        """Tokens of a whole conversation as the template writes it now, up to where the agent speaks.

        It need not begin with what was recorded: see `rewrites_history`.

        Raises:
            UsageError: rendering is plain, which has no form for turns that were not sampled.
        """
        if not self._template:
            raise UsageError("render: 'plain' renders no whole conversations; accepted: chat")
        return self._encode(self._template.prompt(messages, tools))

    def action_text(self, tokens: Sequence[int], stop: tuple[str, ...]) -> str:
        """The text of a turn, without its stop token and up to the first of the strings `stop`."""
        ids = [int(token) for token in tokens]
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = self._decode(ids)
        return text[: min((text.index(mark) for mark in stop if mark in text), default=len(text))]

    def demonstration(self, action: Action) -> list[int]:
        """Tokens of a right answer, ended by the stop token."""
        return [*self._encode(action.text), self.stop_token_ids[0]]

    @cached_property
    def _end_of_turn(self) -> int | None:
        """The first special token that the template puts after an assistant's message."""
        if not self._template:
            return None
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        tokens = self._encode(self._template.after_a_turn((), generation_prompt=False))
        return next((token for token in tokens if token in special), None)

    @cached_property
    def _end_of_call(self) -> int | None:
        if self._wire is None or self._template is None or _END_OF_CALL not in self._template.source:
            return None
        return self._tokenizer.get_added_vocab().get(_END_OF_CALL)

    @cached_property
    def _ends_of_turns(self) -> frozenset[int | None]:
        return frozenset({self._end_of_turn, self._end_of_call})

    def _plain(self, observation: Observation) -> str:
        """Contents joined; results of tools as the format writes them, on lines of their own."""
        if self._wire is None:
            return observation.text
        text = ""
        for are_results, group in groupby(observation.messages, lambda message: message.role == "tool"):
            contents = [message.content for message in group]
            text += f"\n{self._wire.respond(contents)}\n" if are_results else "".join(contents)
        return text

    def _encode(self, text: str) -> list[int]:
        if any("\ud800" <= character <= "\udfff" for character in text):  # bytes that were not UTF-8
            raise UsageError(f"text: {text!r:.80} holds a lone surrogate; accepted: text that UTF-8 can hold")
        return list(self._tokens(text))

    def _tokenized(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)
