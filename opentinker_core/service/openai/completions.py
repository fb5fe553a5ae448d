"""`/v1/completions`: prompts of text or tokens, continued."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from envs.protocol import Message, Observation
from opentinker_core.sampling.protocol import DrawnToken
from opentinker_core.service.dependencies import Serving
from opentinker_core.service.openai.answers import CompletionLogprobs, usage
from opentinker_core.service.openai.asking import Asked, ask, respond
from opentinker_core.service.openai.bodies import CompletionBody
from opentinker_core.service.principal import Who

router = APIRouter(prefix="/v1", tags=["openai"])


@router.post("/completions", response_model=None)
async def completions(service: Serving, who: Who, request: Request, body: CompletionBody) -> Response:
    """Continue prompts; streamed, as the tokens come, if `stream` is true."""
    body.check()
    prompts = [
        Observation((Message("user", prompt),)) if isinstance(prompt, str) else prompt
        for prompt in body.prompts
    ]
    asked = await ask(service, who.tenant, body, "plain", prompts, body.max_tokens, body.logprobs or 0)
    return await respond(request, body, asked, _Answer(asked, body))


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
        logprobs: dict[int, CompletionLogprobs] = {}
        tokens = 0
        options = self._body.stream_options
        with_usage: dict[str, object] = {"usage": None} if options and options.include_usage else {}
        async with aclosing(self._asked.texts()) as texts:
            async for token, text, begins in texts:
                if begins:
                    logprobs[token.index] = self._logprobs()
                tokens += 1
                choice = self._choice(token.index, text, [token], logprobs[token.index], is_first=begins)
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
