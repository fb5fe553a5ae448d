"""Observations to tokens, tokens to actions. What was recorded is never rendered or encoded again."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from envs.protocol import Action, Message, Observation
from opentinker_core.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DATE = "01 Jan 2025"
"""What templates that ask for a `date_string` are given: a run must not depend on the day."""


class Renderer:
    """Turns messages into tokens, as plain text or with the model's chat template."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", mode: Literal["plain", "chat"]) -> None:
        """Bind a tokenizer.

        Raises:
            UsageError: the mode is unknown, or the tokenizer has no chat template or no stop token.
        """
        if mode not in ("plain", "chat"):
            raise UsageError(f"render: {mode!r} is unknown; accepted: plain, chat")
        if mode == "chat" and not tokenizer.chat_template:
            raise UsageError("render: the base model has no chat template; accepted: plain")
        self._tokenizer = tokenizer
        self._chat = mode == "chat"
        if not self.stop_token_ids:
            raise UsageError("base_model: the tokenizer has no end-of-sequence token")

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn: the template's end of turn (chat) first, then the end of sequence."""
        ends = (self._end_of_turn, self._tokenizer.eos_token_id)
        return tuple(dict.fromkeys(token for token in ends if token is not None))

    def initial(self, observation: Observation) -> list[int]:
        """Tokens of an episode's first prompt, up to where the agent begins to speak."""
        if not self._chat:
            return self._encode(observation.text)
        return self._encode(self._render(observation.messages, generation_prompt=True))

    def following(self, observation: Observation, generated: Sequence[int]) -> list[int]:
        """Only the tokens to append after the recorded ids, which end with the turn `generated`.

        With a chat template they close the agent's turn, unless it closed it itself.
        """
        if not self._chat:
            return self._encode(observation.text)
        tokens = self._encode(self._after_a_turn(observation.messages, generation_prompt=True))
        if generated and generated[-1] == self._end_of_turn:
            return tokens[tokens.index(self._end_of_turn) + 1 :]
        return tokens

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
        if not self._chat:
            return None
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        tokens = self._encode(self._after_a_turn((), generation_prompt=False))
        return next((token for token in tokens if token in special), None)

    def _after_a_turn(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """What the template writes after an assistant's message that is followed by `messages`.

        The message is a mark whose text is then looked for; the user's turn before it keeps
        templates content that demand alternation, and takes the default system prompt.
        """
        mark = "opentinker:turn"
        while any(mark in message.content for message in messages):
            mark += ":"
        dialogue = (Message("user", "?"), Message("assistant", mark), *messages)
        before, found, after = self._render(dialogue, generation_prompt=generation_prompt).partition(mark)
        if not before or not found or mark in after:
            raise UsageError(
                "render: the base model's chat template does not show an assistant's message once"
            )
        return after

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        dialogue = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                dialogue,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                date_string=_DATE,
            )
        except TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise UsageError(
                f"render: the chat template refuses messages of roles {roles}: {error}"
            ) from error
        return str(text)

    def _encode(self, text: str) -> list[int]:
        if any("\ud800" <= character <= "\udfff" for character in text):  # bytes that were not UTF-8
            raise UsageError(f"text: {text!r:.80} holds a lone surrogate; accepted: text that UTF-8 can hold")
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)
