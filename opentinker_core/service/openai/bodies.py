"""Bodies of requests as OpenAI's clients send them, with the additions that vLLM's servers take too.

Fields that would change what is sampled and are not supported are refused; others that are unknown are
ignored, as they are by other servers.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from opentinker_core.errors import UsageError

Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=16)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Text = Annotated[str, Field(max_length=1 << 22)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]

MOST_COMPLETIONS = 1024
"""Of one request, all prompts together."""
MOST_CELLS = 1 << 21
"""Likeliest tokens that one request may ask for."""

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "audio": (None,),
}
"""Fields that are not supported, and the values of theirs that ask for nothing."""


class StreamOptions(BaseModel):
    """What a stream tells besides."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class Body(BaseModel):
    """What both kinds of completion take."""

    model_config = ConfigDict(extra="allow")
    model: Annotated[str, Field(min_length=1, max_length=1024)]
    n: Annotated[int, Field(ge=1, le=MOST_COMPLETIONS)] = 1
    seed: Seed | None = None
    stop: Annotated[str, Field(min_length=1, max_length=1024)] | Stops | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    """As in vLLM; -1 and 0: no limit."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """As in vLLM."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] = Field(default_factory=list)
    """As in vLLM: further tokens that end a completion."""
    ignore_eos: bool = False
    """As in vLLM: the model's own stop tokens do not end a completion."""
    return_token_ids: bool = False
    """As in vLLM: the ids of the prompt's and the completions' tokens are given too."""

    @field_validator("n", "top_k", "min_p", "stop_token_ids", "ignore_eos", "return_token_ids", mode="before")
    @classmethod
    def _null_is_not_given(cls, value: object, info: ValidationInfo) -> object:
        """As for the other fields: clients write null for what they leave open."""
        assert info.field_name is not None
        field = cls.model_fields[info.field_name]
        return field.get_default(call_default_factory=True) if value is None else value

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check(self) -> None:
        """Refuse what is not supported.

        Raises:
            UsageError: a field asks for it.
        """
        for name, value in (self.model_extra or {}).items():
            if name in _UNSUPPORTED and value not in _UNSUPPORTED[name]:
                raise UsageError(f"{name}: not supported; accepted: none")


class CompletionBody(Body):
    """The body of `/v1/completions`."""

    prompt: (
        Text
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[list[TokenId]], Field(min_length=1)]
    )
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = 16
    """None: as many as there is room for."""
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    """That many of the likeliest tokens at each position; 0: the sampled token alone."""

    @property
    def prompts(self) -> list[str | list[int]]:
        """One prompt an item."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["text"]
    text: Text


class MessageBody(BaseModel):
    """One utterance."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart]

    @property
    def text(self) -> str:
        """The whole content."""
        return self.content if isinstance(self.content, str) else "".join(one.text for one in self.content)


class ChatBody(Body):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    """The newer name of `max_tokens`, before which it goes; None: as many as there is room for."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None

    def check(self) -> None:
        """See `Body.check`."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise UsageError(
                f"top_logprobs: {self.top_logprobs} without logprobs; accepted: with logprobs true"
            )
        for message in self.messages:
            if (message.model_extra or {}).get("tool_calls"):
                raise UsageError("messages.tool_calls: not supported; accepted: none")
