"""`/v1/chat/completions`: messages, rendered by the base model's chat template, answered."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from envs.protocol import Message, Observation
from opentinker_core.sampling.protocol import DrawnToken
from opentinker_core.service.dependencies import Serving
from opentinker_core.service.openai.answers import chat_logprobs, usage
from opentinker_core.service.openai.asking import Asked, ask, respond
from opentinker_core.service.openai.bodies import ChatBody, MessageBody
from opentinker_core.service.principal import Who

router = APIRouter(prefix="/v1", tags=["openai"])


@router.post("/chat/completions", response_model=None)
async def chat_completions(service: Serving, who: Who, request: Request, body: ChatBody) -> Response:
    """Answer messages; streamed, as the tokens come, if `stream` is true."""
    body.check()
    prompt = Observation(tuple(_message(message) for message in body.messages))
    room = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    asked = await ask(service, who.tenant, body, "chat", [prompt], room, body.top_logprobs or 0)
    return await respond(request, body, asked, _Answer(asked, body))


def _message(message: MessageBody) -> Message:
    """OpenAI's newer models call the system's role developer; templates do not know it."""
    return Message("system" if message.role == "developer" else message.role, message.text)


class _Answer:
    """The answer to one request, in one piece or in many."""

    def __init__(self, asked: Asked, body: ChatBody) -> None:
        self._asked, self._body = asked, body
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": asked.model.name,
        }

    def whole(self, completions: Sequence[Sequence[DrawnToken]]) -> dict[str, object]:
        """All of it."""
        choices = []
        for index, tokens in enumerate(completions):
            ids = [token.token for token in tokens]
            text = self._asked.renderer.action_text(ids, self._asked.stop)
            message = {"role": "assistant", "content": text, "refusal": None}
            choices.append({"index": index, "message": message, **self._details(tokens)})
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage(self._asked.prompt_tokens, sum(map(len, completions))),
            **self._prompt_ids(),
        }

    async def chunks(self) -> AsyncGenerator[dict[str, object]]:
        """One chunk a token; the first of each choice has the role too."""
        head = {**self._head, "object": "chat.completion.chunk"}
        tokens = 0
        options = self._body.stream_options
        with_usage: dict[str, object] = {"usage": None} if options and options.include_usage else {}
        async with aclosing(self._asked.texts()) as texts:
            async for token, text, begins in texts:
                delta = {"role": "assistant", "content": text} if begins else {"content": text}
                choice = {"index": token.index, "delta": delta, **self._details([token])}
                ids = self._prompt_ids() if tokens == 0 else {}
                tokens += 1
                yield {**head, "choices": [choice], **with_usage, **ids}
        if with_usage:
            yield {**head, "choices": [], "usage": usage(self._asked.prompt_tokens, tokens)}

    def _details(self, tokens: Sequence[DrawnToken]) -> dict[str, object]:
        details: dict[str, object] = {
            "logprobs": None,
            "finish_reason": tokens[-1].stop_reason and tokens[-1].stop_reason.value,
        }
        if self._body.logprobs:
            top = self._body.top_logprobs or 0
            details["logprobs"] = chat_logprobs(self._asked.tokenizer, tokens, top)
        if self._body.return_token_ids:
            details["token_ids"] = [token.token for token in tokens]
        return details

    def _prompt_ids(self) -> dict[str, object]:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._asked.requests[0].prompt_tokens)}
