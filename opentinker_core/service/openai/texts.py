"""Tokens to text, while they come and when all are there."""

from transformers import PreTrainedTokenizerBase

from opentinker_core.models.renderer import Renderer

_UNFINISHED = "\ufffd"
"""What a decoder shows for bytes of a character whose others are still to come."""


class TextStream:
    """The text of one completion, given out in pieces, which together are the text of the whole."""

    def __init__(self, renderer: Renderer, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        """`stop`: strings that end the completion, and are no part of its text."""
        self._renderer, self._tokenizer, self._stop = renderer, tokenizer, stop
        self._tokens: list[int] = []
        self._begin = self._end = 0
        """Tokens from `_begin` on are decoded again, so that those behind them get their spaces right; the
        text of those before `_end` is known."""
        self._text = ""
        self._given = 0

    def take(self, token: int) -> str:
        """Add a token; gives the text that can be given out by now."""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._begin : self._end])
        grown = self._decode(self._tokens[self._begin :])
        if len(grown) > len(known) and not grown.endswith(_UNFINISHED):
            self._text += grown[len(known) :]
            self._begin, self._end = self._end, len(self._tokens)
        return self._give(len(self._text) - self._held())

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        given, whole = self._text[: self._given], self._renderer.action_text(self._tokens, self._stop)
        return whole[len(given) :] if whole.startswith(given) else ""

    def _give(self, until: int) -> str:
        piece = self._text[self._given : until]
        self._given = max(self._given, until)
        return piece

    def _held(self) -> int:
        """Characters at the end that may be no part of the text: a stop string, or what begins like one."""
        starts = [self._text.find(stop, max(0, self._given - len(stop))) for stop in self._stop]
        found = [len(self._text) - start for start in starts if start >= 0]
        begun = [
            size for stop in self._stop for size in range(1, len(stop)) if self._text.endswith(stop[:size])
        ]
        tail = 0
        if self._tokens[-1] in self._renderer.stop_token_ids:
            tail = len(self._decode(self._tokens[-1:]))
        return max([0, tail, *found, *begun])

    def _decode(self, tokens: list[int]) -> str:
        return text_of(self._tokenizer, tokens)


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """Exactly the text that tokens stand for, special tokens too."""
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
