"""Answers as OpenAI's clients read them: logprobs and usage.

Logprobs are the model's: at temperature 1, without truncation, as those of the likeliest tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from opentinker_core.sampling.protocol import DrawnToken
from opentinker_core.service.openai.texts import text_of


def logprob_of(token: DrawnToken) -> float:
    """The model's logprob of a token, or the sampled distribution's where a sampler gives no other."""
    return token.logprob if token.model_logprob is None else token.model_logprob


def chat_logprobs(
    tokenizer: PreTrainedTokenizerBase, tokens: Iterable[DrawnToken], top: int
) -> dict[str, object]:
    """The `logprobs` of a choice of a chat."""
    content = []
    for token in tokens:
        entry = _entry(tokenizer, token.token, logprob_of(token))
        entry["top_logprobs"] = [_entry(tokenizer, *pair) for pair in token.top[:top]]
        content.append(entry)
    return {"content": content, "refusal": None}


def _entry(tokenizer: PreTrainedTokenizerBase, token: int, logprob: float) -> dict[str, object]:
    text = text_of(tokenizer, [token])
    # A part of a character has no text of its own, and its bytes are not known here.
    whole = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


@dataclass
class CompletionLogprobs:
    """The `logprobs` of a choice of a completion, piece by piece."""

    tokenizer: PreTrainedTokenizerBase
    top: int
    offset: int = 0
    """Of the next token in the text."""

    def of(self, tokens: Iterable[DrawnToken]) -> dict[str, object]:
        """Those of the next tokens."""
        texts, logprobs, tops, offsets = [], [], [], []
        for token in tokens:
            text = text_of(self.tokenizer, [token.token])
            texts.append(text)
            logprobs.append(logprob_of(token))
            pairs = [(text_of(self.tokenizer, [one]), value) for one, value in token.top[: self.top]]
            tops.append(dict(reversed([*pairs, (text, logprob_of(token))])) if self.top else None)
            offsets.append(self.offset)
            self.offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": tops if self.top else None,
            "text_offset": offsets,
        }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """What a request took."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
