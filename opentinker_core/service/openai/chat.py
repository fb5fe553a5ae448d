"""`/v1/chat/completions`: messages, rendered by the base model's chat template, answered."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from envs.protocol import Message
from opentinker_core.sampling.protocol import DrawnToken
from opentinker_core.service.dependencies import Serving
from opentinker_core.service.incoming import while_connected
from opentinker_core.service.openai.answers import chat_logprobs, usage
from opentinker_core.service.openai.asking import (
    Asked,
    encode,
    events,
    renderer_of,
    to_requests,
)
from opentinker_core.service.openai.bodies import ChatBody, MessageBody
from opentinker_core.service.openai.targets import find_target
from opentinker_core.service.openai.texts import TextStream
from opentinker_core.service.principal import Who

router = APIRouter(prefix="/v1", tags=["openai"])


@router.post("/chat/completions", response_model=None)
async def chat_completions(service: Serving, who: Who, request: Request, body: ChatBody) -> Response:
    """Answer messages; streamed, as the tokens come, if `stream` is true."""
    body.check()
    model = await find_target(service, who.tenant, body.model)
    engine = service.engine(model.target.base_model, who.tenant)
    renderer = renderer_of(engine.tokenizer, "chat")
    prompt = await encode(engine, "chat", [_message(message) for message in body.messages])
    room = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    requests = to_requests(engine, renderer, body, [prompt], room, body.top_logprobs or 0)
    asked = Asked(service, who.tenant, model, renderer, engine.tokenizer, requests)
    answer = _Answer(asked, body)
    if body.stream:
        return await events(request, answer.chunks())
    return JSONResponse(answer.whole(await while_connected(request.receive, asked.whole())))


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
        texts: dict[int, TextStream] = {}
        tokens = 0
        options = self._body.stream_options
        with_usage: dict[str, object] = {"usage": None} if options and options.include_usage else {}
        async with aclosing(self._asked.pieces()) as pieces:
            async for token in pieces:
                delta: dict[str, object] = {}
                if token.index not in texts:
                    texts[token.index] = TextStream(
                        self._asked.renderer, self._asked.tokenizer, self._asked.stop
                    )
                    delta["role"] = "assistant"
                text = texts[token.index].take(token.token)
                if token.stop_reason is not None:
                    text += texts[token.index].finish()
                delta["content"] = text
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
