"""The native sampler: batched decoding with a KV cache over the runtime's own base model.

The prompt of a request is prefilled once for all its seeds. Each completion draws from its own
generator, so its tokens depend on its seed and not on its neighbours' draws.

Axes: P prompts, B sequences, T prompt columns, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.pool import AdapterPool, Slot, Wanted
from opentinker_core.lora.routing import Routing, Rows, routed
from opentinker_core.models.decoder import Decoder
from opentinker_core.policies.residency.host import HostTier
from opentinker_core.policies.residency.types import Backing
from opentinker_core.sampling.distribution import log_distribution
from opentinker_core.sampling.protocol import BASE, SampledSequence, SampleRequest, SamplingParams
from opentinker_core.trajectories.types import StopReason

ReadAdapter = Callable[[Path], Adapter]
FetchSnapshot = Callable[[str, str], Path]


class _Snapshots(Backing[Adapter]):
    """Adapters by the digest of their snapshots."""

    def __init__(self, fetch: FetchSnapshot, read_adapter: ReadAdapter) -> None:
        self._fetch, self._read_adapter = fetch, read_adapter
        self.uris: dict[str, str] = {}

    def expected_bytes(self, key: str) -> int:
        return sum(path.stat().st_size for path in self._fetch(self.uris[key], key).glob("*.safetensors"))

    def load(self, key: str) -> Adapter:
        return self._read_adapter(self._fetch(self.uris[key], key))

    def bytes_of(self, value: Adapter) -> int:
        return value.nbytes


class NativeSampler:
    """Samples from the base model and from the versions it was refreshed with."""

    def __init__(
        self,
        decoder: Decoder,
        pool: AdapterPool,
        tokenizer: PreTrainedTokenizerBase,
        fetch: FetchSnapshot,
        read_adapter: ReadAdapter,
        *,
        memory: int = 1 << 30,
        max_batch: int = 256,
    ) -> None:
        """`fetch(uri, digest)` gives the verified directory of a snapshot, `read_adapter` loads it.

        Adapters of versions that were used last stay in `memory` bytes; others are read again when wanted.
        """
        self._decoder = decoder
        self._pool = pool
        self._tokenizer = tokenizer
        self._max_context = decoder.max_context
        self._max_batch = max_batch
        self._digests: dict[str, str] = {}
        self._snapshots = _Snapshots(fetch, read_adapter)
        self._adapters = HostTier(self._snapshots, memory)

    def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        """See `Sampler.refresh`. Adapters are kept by digest, so a version can never get another's."""
        self._snapshots.uris[digest] = snapshot_uri
        with self._adapters.lease(digest):  # what cannot be read is refused now, not when it is sampled
            self._digests[version] = digest

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[SampledSequence]]:
        """See `Sampler.sample`. Requests of all versions and all shapes of sampling share a batch."""
        for request in requests:
            self.check(request)
        results: list[list[SampledSequence]] = [[] for _ in requests]
        for part in self._parts(requests):
            versions = {requests[index].version for index in part} - {BASE}
            with ExitStack() as leases:
                adapters = {
                    digest: leases.enter_context(self._adapters.lease(digest))
                    for digest in sorted({self._digests[version] for version in versions})
                }
                wanted = {("version", digest): Wanted(adapter) for digest, adapter in adapters.items()}
                slots = leases.enter_context(self._pool.lease(wanted))
                leases.enter_context(torch.inference_mode())
                slot_of = {v: slots["version", self._digests[v]] for v in versions}
                order = sorted(part, key=lambda index: _place(slot_of.get(requests[index].version)))
                chosen = [requests[index] for index in order]
                batch = _Batch(self._decoder, self._pool, chosen, [slot_of.get(r.version) for r in chosen])
                for index, sequences in zip(order, batch.generate(self._tokenizer), strict=True):
                    results[index] = sequences
        return results

    def check(self, request: SampleRequest) -> None:
        """Refuse what cannot be sampled.

        Raises:
            UsageError: see `Sampler.sample`.
        """
        if request.version != BASE and request.version not in self._digests:
            known = ", ".join([BASE, *list(self._digests)[-10:]])
            raise UsageError(f"version: {request.version!r} is not served; accepted: {known}")
        if not request.prompt_tokens:
            raise UsageError("prompt_tokens: empty; accepted: at least one token")
        room = self._max_context - len(request.prompt_tokens)
        if room < 1:
            raise UsageError(
                f"prompt: {len(request.prompt_tokens)} tokens; accepted: fewer than the context of "
                f"{self._max_context}"
            )
        if request.params.max_tokens > room:
            raise UsageError(
                f"max_tokens: {request.params.max_tokens} after a prompt of {len(request.prompt_tokens)} "
                f"tokens; accepted: at most {room}, so that both fit the context of {self._max_context}"
            )

    def _parts(self, requests: Sequence[SampleRequest]) -> list[list[int]]:
        """Split requests: at most `max_batch` sequences a part, if it can, and as many versions as slots."""
        parts: list[list[int]] = []
        lengths = self._lengths(requests)
        size, versions, length = self._max_batch, set[str](), 0
        for index in sorted(range(len(requests)), key=lambda i: (lengths[i], requests[i].version)):
            request = requests[index]
            wider = versions | {request.version}
            full = size + len(request.seeds) > self._max_batch or len(wider) > self._pool.max_slots
            if full or lengths[index] != length:
                parts.append([])
                size, wider = 0, {request.version}
            parts[-1].append(index)
            size, versions, length = size + len(request.seeds), wider, lengths[index]
        return parts

    def _lengths(self, requests: Sequence[SampleRequest]) -> list[int]:
        """Which requests may be padded to one width: those of equal numbers.

        A window of attention counts the columns of the cache; past it, padding would take tokens' places.
        """
        lengths = [len(request.prompt_tokens) for request in requests]
        longest = max(lengths, default=0) + max((r.params.max_tokens for r in requests), default=0)
        window = self._decoder.window
        return lengths if window is not None and longest > window else [0] * len(lengths)


def _place(slot: Slot | None) -> tuple[int, int]:
    return (slot.rank, slot.index) if slot else (0, 0)


class _Batch:
    """Requests that are decoded together; those of one slot are adjacent."""

    def __init__(
        self,
        decoder: Decoder,
        pool: AdapterPool,
        requests: Sequence[SampleRequest],
        slots: Sequence[Slot | None],
    ) -> None:
        self._decoder, self._pool, self._requests, self._slots = decoder, pool, requests, slots
        self._prompt_of_B = [p for p, request in enumerate(requests) for _ in request.seeds]

    def generate(self, tokenizer: PreTrainedTokenizerBase) -> list[list[SampledSequence]]:
        """The completions of each request, in the order of its seeds."""
        draws = _MixedDraws(self._requests, self._prompt_of_B, tokenizer)
        routing = self._routing(self._slots, max(len(request.prompt_tokens) for request in self._requests))
        decoding = _Decoding.start(
            self._decoder,
            [request.prompt_tokens for request in self._requests],
            np.array(self._prompt_of_B),
            routing,
            self._routing(self._slots),
        )
        routing = self._routing([self._slots[p] for p in self._prompt_of_B])
        while True:
            tokens_B = draws.step(decoding.logits_BV, decoding.rows)
            active_B = draws.active(decoding.rows)
            if not active_B.any():
                break
            if not active_B.all():
                routing = self._routing([self._slots[self._prompt_of_B[b]] for b in decoding.rows[active_B]])
            decoding.advance(tokens_B, active_B, routing)
        results: list[list[SampledSequence]] = [[] for _ in self._requests]
        for b, prompt in enumerate(self._prompt_of_B):
            results[prompt].append(draws.sequence(b, self._requests[prompt].version))
        return results

    def _routing(self, slots: Sequence[Slot | None], times: int = 1) -> Routing | None:
        if all(slot is None for slot in slots):
            return None
        return Routing(self._pool, [Rows(times, slot) for slot in slots], invariant=False)


class _MixedDraws:
    """Draws for a batch whose requests may want different sampling parameters."""

    def __init__(
        self,
        requests: Sequence[SampleRequest],
        prompt_of_B: Sequence[int],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        seeds = [seed for request in requests for seed in request.seeds]
        members: dict[SamplingParams, list[int]] = {}
        for b, prompt in enumerate(prompt_of_B):
            members.setdefault(requests[prompt].params, []).append(b)
        self._draws = [_Draws(params, [seeds[b] for b in own], tokenizer) for params, own in members.items()]
        self._group_of_B, self._at_B = np.zeros(len(seeds), int), np.zeros(len(seeds), int)
        for group, own in enumerate(members.values()):
            self._group_of_B[own], self._at_B[own] = group, np.arange(len(own))

    def step(self, logits_BV: Tensor, rows: np.ndarray) -> np.ndarray:
        """Draw the next token of each of `rows`; returns them in that order."""
        if len(self._draws) == 1:
            return self._draws[0].step(logits_BV, rows)
        tokens_B = np.zeros(len(rows), np.int64)
        for group, draws in enumerate(self._draws):
            own = np.flatnonzero(self._group_of_B[rows] == group)
            if len(own):
                at = torch.as_tensor(own, device=logits_BV.device)
                tokens_B[own] = draws.step(logits_BV[at], self._at_B[rows[own]])
        return tokens_B

    def active(self, rows: np.ndarray) -> np.ndarray:
        """Bool: which of `rows` go on."""
        return np.array([self._draws[self._group_of_B[b]].is_active(self._at_B[b]) for b in rows])

    def sequence(self, row: int, version: str) -> SampledSequence:
        """What was drawn for a row."""
        return self._draws[self._group_of_B[row]].sequence(self._at_B[row], version)


class _Draws:
    """Tokens drawn so far, of every sequence of a batch."""

    def __init__(
        self, params: SamplingParams, seeds: Sequence[int], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._params = params
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(params.stop_token_ids)
        # Philox is counter-based: cheap to create, and the stream is fixed by numpy's policy.
        self._uniform_BT = np.stack(
            [np.random.Generator(np.random.Philox(seed)).random(params.max_tokens) for seed in seeds]
        )
        self._tokens: list[list[int]] = [[] for _ in seeds]
        self._logprobs: list[list[float]] = [[] for _ in seeds]
        self._stopped: list[StopReason | None] = [None] * len(seeds)

    def step(self, logits_BV: Tensor, rows: np.ndarray) -> np.ndarray:
        """Draw the next token of each of `rows`; returns them in that order."""
        tokens_B, logprobs_B = self._draw(logits_BV, rows)
        for row, token, logprob in zip(rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            self._tokens[row].append(token)
            self._logprobs[row].append(logprob)
            self._stopped[row] = self._stop_reason(row)
        return tokens_B

    def _draw(self, logits_BV: Tensor, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._params.temperature == 0:
            tokens = logits_BV.argmax(-1).cpu().numpy()
            return tokens, np.zeros(len(rows), np.float32)
        logprobs_BV = log_distribution(logits_BV, self._params)
        # Inverse transform in float64: rounding cannot reach a token of probability zero, because
        # the threshold lies strictly below the total and the search is right-sided.
        cumulative_BV = logprobs_BV.exp().double().cumsum(-1)
        if not bool(cumulative_BV[:, -1].isfinite().all()):
            raise OpenTinkerError(
                f"the distribution at temperature {self._params.temperature} is not finite: "
                "the version's weights are not, or the temperature is too small"
            )
        at = len(self._tokens[rows[0]])
        uniform_B = torch.as_tensor(self._uniform_BT[rows, at], device=logits_BV.device)
        threshold_B = uniform_B[:, None] * cumulative_BV[:, -1:]
        tokens_B = torch.searchsorted(cumulative_BV, threshold_B, right=True)
        picked_B = logprobs_BV.gather(1, tokens_B).squeeze(1).clamp(max=0.0)
        return tokens_B.squeeze(1).cpu().numpy(), picked_B.cpu().numpy()

    def _stop_reason(self, row: int) -> StopReason | None:
        tokens = self._tokens[row]
        if tokens[-1] in self._stop_ids:
            return StopReason.STOP
        if self._params.stop:
            text = self._tokenizer.decode(tokens, skip_special_tokens=True)
            if any(stop in text for stop in self._params.stop):
                return StopReason.STOP
        return StopReason.LENGTH if len(tokens) == self._params.max_tokens else None

    def is_active(self, row: int) -> bool:
        """Whether the row goes on."""
        return self._stopped[row] is None

    def sequence(self, row: int, version: str) -> SampledSequence:
        reason = self._stopped[row]
        assert reason is not None
        tokens, logprobs = np.array(self._tokens[row], np.int32), np.array(self._logprobs[row], np.float32)
        return SampledSequence(tokens, logprobs, reason, version)


@dataclass
class _Decoding:
    """The model's side of a batch: KV cache, and the logits of the next token of the live rows."""

    decoder: Decoder
    cache: DynamicCache
    seen_BT: Tensor
    """int64, 1 where a column of the cache holds a token of the row."""
    rows: np.ndarray
    """Index of the sequence each live row belongs to."""
    logits_BV: Tensor

    @classmethod
    def start(
        cls,
        decoder: Decoder,
        prompts: Sequence[tuple[int, ...]],
        prompt_of_B: np.ndarray,
        routing: Routing | None,
        head_routing: Routing | None,
    ) -> "_Decoding":
        """Prefill each prompt once and fan its cache out to its sequences."""
        device = decoder.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        width = int(lengths.max())
        tokens_PT = torch.zeros(len(prompts), width, dtype=torch.long)
        for p, prompt in enumerate(prompts):
            tokens_PT[p, : len(prompt)] = torch.tensor(prompt)
        cache = DynamicCache(config=decoder.config)
        # Prompts are padded on the right: causal attention already hides the padding.
        with routed(routing):
            hidden_PTD = decoder.hidden(input_ids=tokens_PT.to(device), cache=cache, use_cache=True)
        with routed(head_routing):
            logits_PV = decoder.logits(hidden_PTD[torch.arange(len(prompts), device=device), lengths - 1])
        index_B = torch.as_tensor(prompt_of_B, device=device)
        cache.batch_select_indices(index_B)
        seen_PT = (torch.arange(width, device=device) < lengths[:, None]).long()
        return cls(decoder, cache, seen_PT[index_B], np.arange(len(prompt_of_B)), logits_PV[index_B])

    def advance(self, tokens_B: np.ndarray, active_B: np.ndarray, routing: Routing | None) -> None:
        """Drop finished rows, append each live row's token and compute the next logits."""
        device = self.seen_BT.device
        tokens = torch.as_tensor(tokens_B, device=device)
        if not active_B.all():
            keep = torch.as_tensor(np.flatnonzero(active_B), device=device)
            self.cache.batch_select_indices(keep)
            self.seen_BT, tokens, self.rows = self.seen_BT[keep], tokens[keep], self.rows[active_B]
        position_B = self.seen_BT.sum(1)
        self.seen_BT = torch.cat([self.seen_BT, torch.ones_like(self.seen_BT[:, :1])], dim=1)
        with routed(routing):
            hidden_BTD = self.decoder.hidden(
                input_ids=tokens[:, None],
                attention_mask=None if bool(self.seen_BT.all()) else self.seen_BT,
                position_ids=position_B[:, None],
                cache=self.cache,
                use_cache=True,
            )
            self.logits_BV = self.decoder.logits(hidden_BTD[:, -1])
