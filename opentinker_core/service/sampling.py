"""Sampling for tenants: requests of all of them meet in the shared engine, each by the version it names.

Nouns: SampleTarget (what samples), SamplingDesk (where it is asked for).
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from opentinker_core.errors import UsageError
from opentinker_core.policies.types import PolicyVersion
from opentinker_core.runtime.engine import Engine
from opentinker_core.sampling.protocol import BASE, DrawnToken, Listener, SampledSequence, SampleRequest
from opentinker_core.seeds import derive_seed
from opentinker_core.service.leases import VersionLeases
from opentinker_core.service.samplers import AsyncSampler
from opentinker_core.service.types import SamplerHandle

_HANDLES = 4096
"""Samplers that are remembered."""
LEAST_TEMPERATURE = 1e-4
COMPLETIONS_AT_ONCE = 64
"""Completions of one prompt that are one operation of the engine: more would keep other tenants waiting."""
OPERATIONS_AT_ONCE = 512
"""Operations of one tenant that the engine has at a time; what is above waits here."""


@dataclass(frozen=True)
class SampleTarget:
    """What samples: a version of a policy, or the base model alone."""

    base_model: str
    """As the server names it."""
    version: PolicyVersion | None = None
    """None: the base model."""

    @property
    def subject(self) -> str:
        """The name by which samplers know it; policy ids are unique across tenants, names are not."""
        return BASE if self.version is None else f"{self.version.policy_id}@{self.version.number}"


def seeds_of(seed: int, samples: int) -> tuple[int, ...]:
    """The generator seeds of a request's completions: the first has the request's own seed."""
    own = seed % (1 << 64)
    return (own, *(derive_seed(own, "sample", index) for index in range(1, samples)))


def ends_of(engine: Engine) -> tuple[int, ...]:
    """Tokens that end a sequence, as the base model's tokenizer and its generation config say."""
    own = engine.tokenizer.eos_token_id
    return tuple(dict.fromkeys([*([] if own is None else [int(own)]), *_configured_ends(engine.source.path)]))


@cache
def _configured_ends(model: Path) -> tuple[int, ...]:
    config = model / "generation_config.json"
    ends = json.loads(config.read_text()).get("eos_token_id") if config.is_file() else None
    return tuple(ends) if isinstance(ends, list) else () if ends is None else (int(ends),)


def check_temperature(temperature: float) -> float:
    """Return a temperature that logits can be divided by.

    Raises:
        UsageError: it is so small that the quotients have no bounds.
    """
    if 0 < temperature < LEAST_TEMPERATURE:
        raise UsageError(
            f"temperature: {temperature}; accepted: 0 (the likeliest token), or {LEAST_TEMPERATURE} and more"
        )
    return temperature


def room_for(engine: Engine, prompt_tokens: int) -> int:
    """Tokens that may follow a prompt, one at least: what is too long is refused where it is sampled."""
    return max(1, engine.longest - prompt_tokens)


class SamplingDesk:
    """Where tenants ask for completions; used by the event loop's thread alone.

    Versions are refreshed when somebody first wants them and released when nobody has wanted them for a
    while (see `leases`). Whoever is cancelled while waiting is taken out of the running batch.
    """

    def __init__(self, engine: Callable[[str, str], Engine]) -> None:
        """`engine(base_model, tenant)` gives a tenant's view of a base model's engine."""
        self._engine = engine
        self._samplers: dict[tuple[str, str], AsyncSampler] = {}
        self._handles: dict[tuple[str, str], SamplerHandle] = {}
        self.leases = VersionLeases()
        self._room: dict[str, asyncio.Semaphore] = {}

    async def handle(
        self, tenant: str, sampler_id: str, read: Callable[[], Awaitable[SamplerHandle]]
    ) -> SamplerHandle:
        """A sampler of a tenant: what it is never changes, so it is read once."""
        key = (tenant, sampler_id)
        found = self._handles.get(key)
        if found is None:
            found = self._handles[key] = await read()
            if len(self._handles) > _HANDLES:
                del self._handles[next(iter(self._handles))]
        return found

    async def sample(
        self, tenant: str, target: SampleTarget, requests: Sequence[SampleRequest]
    ) -> list[list[SampledSequence]]:
        """Complete every request by `target`, whatever `version` it names; see `Sampler.sample`.

        Questions about the prompt are answered by the first completion of a request alone.

        Raises:
            UsageError: a request cannot be sampled.
            SnapshotError: the version's snapshot is missing or corrupt.
            CancelledError: the caller's task was cancelled; nothing of it goes on.
        """
        sampler = self._sampler(target.base_model, tenant)
        requests = [replace(request, version=target.subject) for request in requests]
        pieces = [(index, piece) for index, request in enumerate(requests) for piece in _pieces(request)]
        async with self.leases.hold(sampler, target.subject, target.version):
            tasks = [asyncio.ensure_future(self._run(sampler, tenant, piece)) for _, piece in pieces]
            try:
                parts = await asyncio.gather(*tasks)
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise
        results: list[list[SampledSequence]] = [[] for _ in requests]
        for (index, _), part in zip(pieces, parts, strict=True):
            results[index] += part
        return results

    async def stream(
        self, tenant: str, target: SampleTarget, request: SampleRequest
    ) -> AsyncGenerator[DrawnToken]:
        """Every token as it is drawn, each completion's in their order; the last of each says why it ends.

        Closing the iterator early (`aclosing`) takes what is left out of the running batch.

        Raises:
            UsageError, SnapshotError: see `sample`; before the first token.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[DrawnToken | None] = asyncio.Queue()

        def listen(token: DrawnToken) -> None:  # by the engine's thread
            loop.call_soon_threadsafe(arrived.put_nowait, token)

        told = [0] * len(request.seeds)
        sampling = asyncio.ensure_future(self.sample(tenant, target, [replace(request, listener=listen)]))
        sampling.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (token := await arrived.get()) is not None:
                told[token.index] += 1
                yield token
            for index, sequence in enumerate((await sampling)[0]):
                for token in sequence.drawn(index)[told[index] :]:  # of samplers that tell nothing before
                    yield token
        finally:
            sampling.cancel()

    async def _run(self, sampler: AsyncSampler, tenant: str, piece: SampleRequest) -> list[SampledSequence]:
        async with self._room.setdefault(tenant, asyncio.Semaphore(OPERATIONS_AT_ONCE)):
            return await sampler.sample(piece)

    def _sampler(self, base_model: str, tenant: str) -> AsyncSampler:
        key = (base_model, tenant)
        if key not in self._samplers:
            self._samplers[key] = AsyncSampler(self._engine(base_model, tenant).sampler)
        return self._samplers[key]


def _pieces(request: SampleRequest) -> list[SampleRequest]:
    """The request cut into operations; the first alone tells of the prompt."""
    pieces = []
    for first in range(0, len(request.seeds), COMPLETIONS_AT_ONCE):
        piece = replace(request, seeds=request.seeds[first : first + COMPLETIONS_AT_ONCE])
        if first:
            piece = replace(piece, prompt_logprobs=False, about_prompt=None)
            if request.listener is not None:
                piece = replace(piece, listener=_shifted(request.listener, first))
        pieces.append(piece)
    return pieces


def _shifted(listener: Listener, first: int) -> Listener:
    """A listener of a piece whose completions are counted from `first` on in the request."""
    return lambda token: listener(replace(token, index=token.index + first))
