"""What both kinds of completion do: make sample requests, sample whole or token by token, send events."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal, Protocol

from fastapi import Request, Response
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from envs.protocol import Observation
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.models.renderer import Renderer
from opentinker_core.runtime.engine import Engine
from opentinker_core.sampling.protocol import BASE, DrawnToken, SampleRequest, SamplingParams
from opentinker_core.service.core import Service
from opentinker_core.service.errors import answer_for
from opentinker_core.service.incoming import while_connected
from opentinker_core.service.openai.bodies import MOST_CELLS, MOST_COMPLETIONS, Body
from opentinker_core.service.openai.targets import NamedTarget, find_target
from opentinker_core.service.openai.texts import TextStream
from opentinker_core.service.quotas import Hold
from opentinker_core.service.sampling import check_temperature, room_for, seeds_of

Mode = Literal["plain", "chat"]
"""How messages become a prompt: their texts alone, or by the model's chat template."""

_Arrived = asyncio.Queue[DrawnToken | Exception | None]
"""Tokens, then None; or an error."""

_LONG_TEXT = 20_000
"""Characters beyond which a text is not encoded on the event loop."""
_CHARACTERS_A_TOKEN = 256
"""More than any token has: a text that is longer than the context by this much need not be encoded."""


@dataclass(frozen=True, eq=False)
class Asked:
    """Completions that a client asked for, ready to be sampled."""

    service: Service
    tenant: str
    model: NamedTarget
    renderer: Renderer
    tokenizer: PreTrainedTokenizerBase
    requests: tuple[SampleRequest, ...]
    """One a prompt."""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_tokens) for request in self.requests)

    @property
    def stop(self) -> tuple[str, ...]:
        return self.requests[0].params.stop

    def admit(self) -> Hold:
        """Count it as running; see `Quotas.admit`."""
        return self.service.quotas.admit(self.tenant, self.prompt_tokens)

    async def whole(self) -> list[list[DrawnToken]]:
        """All tokens of each completion, prompt by prompt."""
        with self.admit() as hold:
            answers = await self.service.sampling.sample(self.tenant, self.model.target, self.requests)
            completions = [sequence.drawn(0) for answer in answers for sequence in answer]
            hold.end(sum(map(len, completions)))
        return completions

    async def pieces(self) -> AsyncGenerator[DrawnToken]:
        """Tokens as they are drawn; completions are counted through all prompts."""
        arrived: _Arrived = asyncio.Queue()
        sampling = asyncio.ensure_future(self._sample(arrived))
        try:
            while (token := await arrived.get()) is not None:
                if isinstance(token, Exception):
                    raise token
                yield token
        finally:
            sampling.cancel()

    async def texts(self) -> AsyncGenerator[tuple[DrawnToken, str, bool]]:
        """As `pieces`, each token with the text that it makes certain, and whether its completion begins."""
        texts: dict[int, TextStream] = {}
        async with aclosing(self.pieces()) as pieces:
            async for token in pieces:
                begins = token.index not in texts
                if begins:
                    texts[token.index] = TextStream(self.renderer, self.tokenizer, self.stop)
                text = texts[token.index].take(token.token)
                if token.stop_reason is not None:
                    text += texts[token.index].finish()
                yield token, text, begins

    async def _sample(self, arrived: _Arrived) -> None:
        """Counts as running while it samples, which a client that reads slowly does not hold up."""
        drawn, firsts = 0, accumulate((len(request.seeds) for request in self.requests), initial=0)

        async def forward(request: SampleRequest, first: int) -> None:
            nonlocal drawn
            stream = self.service.sampling.stream(self.tenant, self.model.target, request)
            async with aclosing(stream) as tokens:
                async for token in tokens:
                    drawn += 1
                    arrived.put_nowait(replace(token, index=token.index + first))

        try:
            with self.admit() as hold:
                tasks = [
                    asyncio.ensure_future(forward(*one)) for one in zip(self.requests, firsts, strict=False)
                ]
                try:
                    await asyncio.gather(*tasks)
                finally:
                    for task in tasks:
                        task.cancel()
                    hold.end(drawn)
        except Exception as error:  # noqa: BLE001 - it is raised where the tokens are awaited
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)


async def ask(
    service: Service,
    tenant: str,
    body: Body,
    mode: Mode,
    prompts: Sequence[list[int] | Observation],
    max_tokens: int | None,
    top_logprobs: int,
) -> Asked:
    """Make ready what a request asks for: `prompts` are tokens, or what `mode` renders.

    Raises:
        NotFound: the tenant has no such model.
        UsageError: it asks for more than one request may.
    """
    model = await find_target(service, tenant, body.model)
    engine = service.engine(model.target.base_model, tenant)
    renderer = _renderer(engine.tokenizer, mode)
    encoded = [
        await _encode(engine, renderer, prompt) if isinstance(prompt, Observation) else prompt
        for prompt in prompts
    ]
    requests = _to_requests(engine, renderer, body, encoded, max_tokens, top_logprobs)
    return Asked(service, tenant, model, renderer, engine.tokenizer, requests)


class Answer(Protocol):
    """The answer to one request, in one piece or in many."""

    def whole(self, completions: Sequence[Sequence[DrawnToken]]) -> dict[str, object]:
        """All of it; `completions`: prompt by prompt."""
        ...

    def chunks(self) -> AsyncGenerator[dict[str, object]]:
        """The answer as it comes."""
        ...


async def respond(request: Request, body: Body, asked: Asked, answer: Answer) -> Response:
    """Sample what was asked for, and give `answer`: in one piece, or as events if `stream` is true."""
    if body.stream:
        return await _events(request, answer.chunks())
    return JSONResponse(answer.whole(await while_connected(request.receive, asked.whole())))


@lru_cache(maxsize=16)
def _renderer(tokenizer: PreTrainedTokenizerBase, mode: Mode) -> Renderer:
    """The renderer of a base model's tokenizer.

    Raises:
        UsageError: it has no chat template.
    """
    return Renderer(tokenizer, mode)


async def _encode(engine: Engine, renderer: Renderer, prompt: Observation) -> list[int]:
    """The tokens of a prompt.

    Raises:
        UsageError: they do not fit the context, or the chat template refuses the messages.
    """
    characters = len(prompt.text)
    if characters > _CHARACTERS_A_TOKEN * engine.max_context:
        raise UsageError(f"prompt: {characters} characters; accepted: {engine.max_context} tokens at most")
    if characters > _LONG_TEXT:
        return await asyncio.to_thread(renderer.initial, prompt)
    return renderer.initial(prompt)


def _to_requests(
    engine: Engine,
    renderer: Renderer,
    body: Body,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    top_logprobs: int,
) -> tuple[SampleRequest, ...]:
    """What is to be sampled for the prompts of a request.

    Raises:
        UsageError: it is more than one request may ask for.
    """
    if len(prompts) * body.n > MOST_COMPLETIONS:
        raise UsageError(f"n: {body.n} for {len(prompts)} prompts; accepted: {MOST_COMPLETIONS} in all")
    ends = () if body.ignore_eos else renderer.stop_token_ids
    seed = secrets.randbits(63) if body.seed is None else body.seed
    seeds = seeds_of(seed, len(prompts) * body.n)
    requests = []
    for at, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError("prompt: empty; accepted: at least one token")
        params = SamplingParams(
            max_tokens=room_for(engine, len(prompt)) if max_tokens is None else max_tokens,
            temperature=check_temperature(1.0 if body.temperature is None else body.temperature),
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(0, body.top_k),
            stop_token_ids=tuple(dict.fromkeys([*body.stop_token_ids, *ends])),
            stop=body.stops,
            min_p=body.min_p,
        )
        positions = params.max_tokens * body.n * len(prompts)
        if top_logprobs * positions > MOST_CELLS:
            raise UsageError(
                f"top_logprobs: {top_logprobs} at up to {positions} positions; accepted: {MOST_CELLS} in all"
            )
        own = seeds[at * body.n : (at + 1) * body.n]
        top = min(top_logprobs, engine.vocabulary)
        requests.append(SampleRequest(tuple(prompt), params, BASE, own, top_logprobs=top))
    return tuple(requests)


class _Events(StreamingResponse):
    """Server-sent events of `chunks`, which end with the response, however that ends."""

    def __init__(self, lines: AsyncIterator[str], chunks: AsyncGenerator[dict[str, object]]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(lines, media_type="text/event-stream", headers=headers)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks):
            await super().__call__(scope, receive, send)


async def _events(request: Request, chunks: AsyncGenerator[dict[str, object]]) -> StreamingResponse:
    """A response of server-sent events, once the first is there: what is refused is an error of HTTP."""
    first = await while_connected(request.receive, anext(chunks))

    async def lines() -> AsyncIterator[str]:
        try:
            yield _event(first)
            async for chunk in chunks:
                yield _event(chunk)
        except OpenTinkerError as error:
            yield _event({"error": answer_for(error).body("")["error"]})
            return
        yield "data: [DONE]\n\n"

    return _Events(lines(), chunks)


def _event(chunk: dict[str, object]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
