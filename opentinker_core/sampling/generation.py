"""Continuous batching: requests join and leave a running batch between steps.

A request is prefilled in chunks beside the tokens that others decode; its completions share the prompt's
keys and values. What cannot get memory waits. When running completions outgrow the memory, the last that
came starts over later: its tokens will be the same, since they depend on nothing but its request.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from opentinker_core.errors import OpenTinkerError
from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.pool import AdapterPool, Slot, Wanted
from opentinker_core.models.decoder import Decoder
from opentinker_core.policies.residency.types import NoRoomError
from opentinker_core.sampling.draws import Draw, draw_tokens
from opentinker_core.sampling.kv_cache import BLOCK, CacheShape, KVCache, Place, copy
from opentinker_core.sampling.prefix_cache import PrefixCache
from opentinker_core.sampling.prompts import PromptScores, is_asked
from opentinker_core.sampling.protocol import BASE, SampledSequence, SampleRequest
from opentinker_core.sampling.step import Piece, Stepper

CHUNK = 16 * BLOCK
"""Tokens of a prompt that are prefilled at once."""

LeaseAdapter = Callable[[str], AbstractContextManager[Adapter]]
"""Keeps the adapter of a snapshot digest in memory; raises NoRoomError where there is none now."""


@dataclass(frozen=True)
class Limits:
    """What runs at once."""

    sequences: int = 256
    prefill_tokens: int = 2048
    """Tokens of prompts in a step, about."""
    kv_bytes: int = 2 << 30
    prefix_bytes: int = 1 << 29


DEFAULT_LIMITS = Limits()


@dataclass
class Counts:
    """Since the start."""

    steps: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    preemptions: int = 0


@dataclass(eq=False)
class Ticket:
    """A request that was handed in, and what became of it."""

    request: SampleRequest
    digest: str
    """Of the version's sampler snapshot; `BASE`: no adapter."""
    outcome: list[SampledSequence] | OpenTinkerError | None = None
    """None: it is not done."""
    sequences: dict[int, SampledSequence] = field(default_factory=dict)
    """Finished, by index of the seed."""
    tokens: int = 0
    """That were put through the model for it so far."""


@dataclass(eq=False)
class _Run:
    """Some of a ticket's completions, which share the prefill of its prompt."""

    ticket: Ticket
    members: list[tuple[int, Draw]]
    lease: ExitStack = field(default_factory=ExitStack)
    adapter: Adapter | None = None
    reserve: int = 0
    """Columns beyond the prompt that it is known to need: it started over for want of them."""
    places: list[Place] = field(default_factory=list)
    """Of each member that is left."""
    prefilled: int = 0
    """Tokens of the prompt whose keys and values are there."""

    def __post_init__(self) -> None:
        self.scores = PromptScores(self.ticket.request)

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.ticket.request.prompt_tokens

    @property
    def is_decoding(self) -> bool:
        return self.prefilled == len(self.prompt)

    def chunk(self) -> int:
        """Tokens of the prompt to prefill next: up to a multiple of `CHUNK`."""
        return min(len(self.prompt), (self.prefilled // CHUNK + 1) * CHUNK) - self.prefilled


class Generation:
    """See the module. Used by one thread."""

    def __init__(
        self,
        decoder: Decoder,
        pool: AdapterPool,
        tokenizer: PreTrainedTokenizerBase | None,
        lease: LeaseAdapter,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._pool, self._tokenizer, self._lease = pool, tokenizer, lease
        self._stepper = Stepper(decoder, pool)
        self.limits = limits
        dtype = decoder.model.dtype
        self.cache = KVCache(CacheShape.of(decoder.config, dtype, decoder.device), limits.kv_bytes)
        self.prefixes = PrefixCache(limits.prefix_bytes)
        self.counts = Counts()
        self._waiting: deque[_Run] = deque()
        self._running: list[_Run] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not (self._running or self._waiting)

    def uses(self, digest: str) -> bool:
        """Whether something that runs or waits is of this snapshot."""
        return any(run.ticket.digest == digest for run in (*self._running, *self._waiting))

    def fits(self, request: SampleRequest) -> bool:
        """Whether memory could hold one completion of `request`, if it ran alone."""
        return self.cache.fits(len(request.prompt_tokens) + request.params.max_tokens)

    def submit(self, request: SampleRequest, digest: str) -> Ticket:
        """Hand in a request; it gets its outcome by `step`."""
        ticket = Ticket(request, digest)
        draws = [(i, Draw(request, i, self._tokenizer)) for i in range(len(request.seeds))]
        if not draws:
            ticket.outcome = []
        for first in range(0, len(draws), self.limits.sequences):
            self._waiting.append(_Run(ticket, draws[first : first + self.limits.sequences]))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Drop what is left of a request."""
        self._fail(ticket, OpenTinkerError("the request was cancelled"))

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what there is room for, and move everything that runs by one pass.

        Raises:
            Exception: the pass broke off. Keys and values may be half written: nothing that ran or waited
                goes on.
        """
        try:
            self._step()
        except Exception:
            self._forget_all()
            raise

    def _step(self) -> None:
        self._admit()
        self._make_room()
        prefilling = self._next_chunks()
        decoding = [run for run in self._running if run.is_decoding and run not in prefilling]
        if not (prefilling or decoding):
            return
        self.counts.steps += 1
        logits = self._forward(prefilling, decoding)
        heads: list[tuple[Tensor, _Run, Draw]] = []
        for run, own_MV in zip(prefilling, logits[: len(prefilling)], strict=True):
            heads += self._prefilled(run, own_MV)
        members = [(run, draw) for run in decoding for _, draw in run.members]
        heads += [(own, *member) for own, member in zip(logits[len(prefilling) :], members, strict=True)]
        self._draw(heads)

    def _admit(self) -> None:
        while self._waiting:
            run = self._waiting[0]
            if not self._has_room(run):
                return
            try:
                run.adapter = self._leased(run)
            except NoRoomError as error:
                if self._running:
                    return
                self._fail(run.ticket, error)
                continue
            except OpenTinkerError as error:
                self._fail(run.ticket, error)
                continue
            if not self._place(run):
                run.lease.close()
                if not self._running:
                    self._split(run)
                    continue
                return
            self._waiting.popleft()
            self._running.append(run)
            known_LHWD = None
            if not is_asked(run.ticket.request):
                known_LHWD = self.prefixes.find(run.ticket.digest, run.prompt)
            if known_LHWD is not None:
                run.prefilled = known_LHWD.shape[3]
                run.places[0].data_LHWD[:, :, :, : run.prefilled] = known_LHWD

    def _has_room(self, run: _Run) -> bool:
        if not self._running:
            return True
        running = sum(len(other.members) for other in self._running)
        digests = {other.ticket.digest for other in self._running} | {run.ticket.digest}
        return (
            running + len(run.members) <= self.limits.sequences
            and len(digests - {BASE}) <= self._pool.max_slots
        )

    def _leased(self, run: _Run) -> Adapter | None:
        if run.ticket.digest == BASE:
            return None
        return run.lease.enter_context(self._lease(run.ticket.digest))

    def _place(self, run: _Run) -> bool:
        """Give every member a place, or none of them."""
        for _ in run.members:
            place = self.cache.place(
                len(run.prompt) + max(1, min(run.reserve, run.ticket.request.params.max_tokens))
            )
            if place is None:
                self._release(run)
                return False
            run.places.append(place)
        return True

    def _split(self, run: _Run) -> None:
        """Let the members of a run that does not fit into memory at once go one half after the other."""
        self._waiting.popleft()
        if len(run.members) == 1:
            self._fail(
                run.ticket, OpenTinkerError(f"prompt: {len(run.prompt)} tokens have no room in memory")
            )
            return
        half = len(run.members) // 2
        self._waiting.appendleft(_Run(run.ticket, run.members[half:]))
        self._waiting.appendleft(_Run(run.ticket, run.members[:half]))

    def _make_room(self) -> None:
        """See that every completion has a column for its next token; those that came last give way."""
        for run in list(self._running):
            if run.is_decoding and run in self._running:
                self._widen(run)

    def _widen(self, run: _Run) -> None:
        index = 0
        while index < len(run.members):
            tokens = len(run.prompt) + len(run.members[index][1].tokens)
            place = self.cache.widened(run.places[index], tokens)
            if place is None:
                self._preempt(self._running[-1])
            else:
                run.places[index] = place
                index += 1

    def _preempt(self, run: _Run) -> None:
        """Stop the last member of `run`, to start over when there is room."""
        self.counts.preemptions += 1
        index, draw = run.members.pop()
        self.cache.release(run.places.pop())
        self._waiting.appendleft(_Run(run.ticket, [(index, draw)], reserve=len(draw.tokens) + BLOCK))
        draw.restart()
        if not run.members:
            self._leave(run)

    def _next_chunks(self) -> list[_Run]:
        chosen: list[_Run] = []
        tokens = 0
        for run in self._running:
            if not run.is_decoding and (not chosen or tokens + run.chunk() <= self.limits.prefill_tokens):
                chosen.append(run)
                tokens += run.chunk()
        return chosen

    def _forward(self, prefilling: Sequence[_Run], decoding: Sequence[_Run]) -> list[Tensor]:
        """Logits of each run that is prefilled, then of each completion that decodes."""
        wanted = {
            ("version", run.ticket.digest): Wanted(run.adapter)
            for run in (*prefilling, *decoding)
            if run.adapter is not None
        }
        with self._pool.lease(wanted) as slots:
            pieces = [_chunk_piece(run, slots.get(("version", run.ticket.digest))) for run in prefilling]
            for run in decoding:
                pieces += _token_pieces(run, slots.get(("version", run.ticket.digest)))
            self.counts.prefilled_tokens += sum(len(piece.tokens) for piece in pieces if piece.is_chunk)
            return self._stepper.run(pieces)

    def _prefilled(self, run: _Run, logits_MV: Tensor) -> list[tuple[Tensor, _Run, Draw]]:
        """Note a chunk; behind the last, every member gets the prompt's keys and values."""
        first = run.prefilled
        run.ticket.tokens += run.chunk()
        run.prefilled += run.chunk()
        if is_asked(run.ticket.request):
            run.scores.note(logits_MV, first)
        if not run.is_decoding:
            return []
        self.prefixes.put(run.ticket.digest, run.prompt, run.places[0].data_LHWD)
        for place in run.places[1:]:
            copy(run.places[0], place, len(run.prompt))
        return [(logits_MV[-1:], run, draw) for _, draw in run.members]

    def _draw(self, heads: Sequence[tuple[Tensor, _Run, Draw]]) -> None:
        if not heads:
            return
        self.counts.decoded_tokens += len(heads)
        failed = draw_tokens(torch.cat([own for own, _, _ in heads]), [draw for _, _, draw in heads])
        owner = {id(draw): run for _, run, draw in heads}
        for run in owner.values():
            run.ticket.tokens += 1
        for draw in failed:
            message = (
                f"the distribution at temperature {draw.params.temperature} is not finite: "
                "the version's weights are not, or the temperature is too small"
            )
            self._fail(owner[id(draw)].ticket, OpenTinkerError(message), scrub=True)
        for run in {id(run): run for _, run, _ in heads}.values():
            self._retire(run)

    def _retire(self, run: _Run) -> None:
        """Hand over the completions of a run that are finished."""
        for at in reversed(range(len(run.members))):
            index, draw = run.members[at]
            if draw.stop_reason is None:
                continue
            run.ticket.sequences[index] = draw.sequence(run.scores.logprobs, run.scores.answer)
            del run.members[at]
            self.cache.release(run.places.pop(at))
        if not run.members and run in self._running:
            self._leave(run)
        ticket = run.ticket
        if ticket.outcome is None and len(ticket.sequences) == len(ticket.request.seeds):
            ticket.outcome = [ticket.sequences[i] for i in range(len(ticket.request.seeds))]

    def _fail(self, ticket: Ticket, error: OpenTinkerError, *, scrub: bool = False) -> None:
        if ticket.outcome is None:
            ticket.outcome = error
        self._waiting = deque(run for run in self._waiting if run.ticket is not ticket)
        for run in [run for run in self._running if run.ticket is ticket]:
            self._release(run, scrub=scrub)
            run.members.clear()
            self._leave(run)

    @torch.inference_mode()
    def _release(self, run: _Run, *, scrub: bool = False) -> None:
        while run.places:
            self.cache.release(run.places.pop(), scrub=scrub)

    def _leave(self, run: _Run) -> None:
        self._running.remove(run)
        run.lease.close()

    def _forget_all(self) -> None:
        for run in list(self._running):
            self._release(run, scrub=True)
            self._leave(run)
        self._waiting.clear()


def _chunk_piece(run: _Run, slot: Slot | None) -> Piece:
    count = run.chunk()
    tokens = run.prompt[run.prefilled : run.prefilled + count]
    is_last = run.prefilled + count == len(run.prompt)
    wanted = count if is_asked(run.ticket.request) else int(is_last)
    return Piece(tokens, run.prefilled, run.places[0], slot, is_chunk=True, wanted=wanted)


def _token_pieces(run: _Run, slot: Slot | None) -> list[Piece]:
    length = len(run.prompt)
    return [
        Piece([draw.tokens[-1]], length + len(draw.tokens) - 1, place, slot, is_chunk=False, wanted=1)
        for (_, draw), place in zip(run.members, run.places, strict=True)
    ]
