"""`/v1/completions`: prompts of text or tokens, continued."""

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
from opentinker_core.service.openai.answers import CompletionLogprobs, usage
from opentinker_core.service.openai.asking import (
    Asked,
    encode,
    events,
    renderer_of,
    to_requests,
)
from opentinker_core.service.openai.bodies import CompletionBody
from opentinker_core.service.openai.targets import find_target
from opentinker_core.service.openai.texts import TextStream
from opentinker_core.service.principal import Who

router = APIRouter(prefix="/v1", tags=["openai"])


@router.post("/completions", response_model=None)
async def completions(service: Serving, who: Who, request: Request, body: CompletionBody) -> Response:
    """Continue prompts; streamed, as the tokens come, if `stream` is true."""
    body.check()
    model = await find_target(service, who.tenant, body.model)
    engine = service.engine(model.target.base_model, who.tenant)
    renderer = renderer_of(engine.tokenizer, "plain")
    prompts = [
        await encode(engine, "plain", [Message("user", prompt)]) if isinstance(prompt, str) else prompt
        for prompt in body.prompts
    ]
    requests = to_requests(engine, renderer, body, prompts, body.max_tokens, body.logprobs or 0)
    asked = Asked(service, who.tenant, model, renderer, engine.tokenizer, requests)
    answer = _Answer(asked, body)
    if body.stream:
        return await events(request, answer.chunks())
    return JSONResponse(answer.whole(await while_connected(request.receive, asked.whole())))


class _Answer:
    """The answer to one request, in one piece or in many."""

    def __init__(self, asked: Asked, body: CompletionBody) -> None:
        self._asked, self._body = asked, body
        self._head: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model.name,
        }

    def whole(self, completions: Sequence[Sequence[DrawnToken]]) -> dict[str, object]:
        """All of it."""
        choices = []
        for index, tokens in enumerate(completions):
            text = self._asked.renderer.action_text([token.token for token in tokens], self._asked.stop)
            choices.append(self._choice(index, text, tokens, self._logprobs(), is_first=True))
        return {
            **self._head,
            "choices": choices,
            "usage": usage(self._asked.prompt_tokens, sum(map(len, completions))),
        }

    async def chunks(self) -> AsyncGenerator[dict[str, object]]:
        """One chunk a token."""
        texts: dict[int, TextStream] = {}
        logprobs: dict[int, CompletionLogprobs] = {}
        tokens = 0
        options = self._body.stream_options
        with_usage: dict[str, object] = {"usage": None} if options and options.include_usage else {}
        async with aclosing(self._asked.pieces()) as pieces:
            async for token in pieces:
                is_first = token.index not in texts
                if is_first:
                    texts[token.index] = TextStream(
                        self._asked.renderer, self._asked.tokenizer, self._asked.stop
                    )
                    logprobs[token.index] = self._logprobs()
                text = texts[token.index].take(token.token)
                if token.stop_reason is not None:
                    text += texts[token.index].finish()
                tokens += 1
                choice = self._choice(token.index, text, [token], logprobs[token.index], is_first=is_first)
                yield {**self._head, "choices": [choice], **with_usage}
        if with_usage:
            yield {**self._head, "choices": [], "usage": usage(self._asked.prompt_tokens, tokens)}

    def _logprobs(self) -> CompletionLogprobs:
        return CompletionLogprobs(self._asked.tokenizer, self._body.logprobs or 0)

    def _choice(
        self,
        index: int,
        text: str,
        tokens: Sequence[DrawnToken],
        logprobs: CompletionLogprobs,
        *,
        is_first: bool,
    ) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "text": text,
            "logprobs": None if self._body.logprobs is None else logprobs.of(tokens),
            "finish_reason": tokens[-1].stop_reason and tokens[-1].stop_reason.value,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = [token.token for token in tokens]
            prompt = self._asked.requests[index // self._body.n].prompt_tokens
            choice["prompt_token_ids"] = list(prompt) if is_first else None
        return choice
