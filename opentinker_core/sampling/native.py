"""The native sampler: continuous batching over the runtime's own base model, versions mixed as they come."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.pool import AdapterPool
from opentinker_core.models.decoder import Decoder
from opentinker_core.policies.residency.host import HostTier
from opentinker_core.policies.residency.types import Backing, NoRoomError
from opentinker_core.sampling.generation import DEFAULT_LIMITS, Counts, Generation, Limits, Ticket
from opentinker_core.sampling.protocol import BASE, PromptQuestion, SampledSequence, SampleRequest

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
    """Samples from the base model and from the versions it was refreshed with. Used by one thread."""

    def __init__(
        self,
        decoder: Decoder,
        pool: AdapterPool,
        tokenizer: PreTrainedTokenizerBase | None,
        fetch: FetchSnapshot,
        read_adapter: ReadAdapter,
        *,
        memory: int = 1 << 30,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """`fetch(uri, digest)` gives the verified directory of a snapshot, `read_adapter` loads it.

        Adapters of versions that were used last stay in `memory` bytes; others are read again when wanted.
        Without a tokenizer there are no stop strings.
        """
        self.max_context = decoder.max_context
        self._vocabulary = int(decoder.config.vocab_size)
        self._tokenizer = tokenizer
        self._digests: dict[str, str] = {}
        self._snapshots = _Snapshots(fetch, read_adapter)
        self._adapters = HostTier(self._snapshots, memory, timeout_s=0)
        self._generation = Generation(decoder, pool, tokenizer, self._lease, limits)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the model's context and the cache have room for."""
        return bisect_right(
            range(1, self.max_context + 1), False, key=lambda tokens: not self._generation.cache.fits(tokens)
        )

    @property
    def counts(self) -> Counts:
        """What was generated so far."""
        return self._generation.counts

    @property
    def generation(self) -> Generation:
        """The running batch, to look at."""
        return self._generation

    @property
    def adapters(self) -> HostTier[Adapter]:
        """The adapters of versions, to look at."""
        return self._adapters

    @property
    def is_idle(self) -> bool:
        """Whether no ticket waits for `step`."""
        return self._generation.is_idle

    def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        """See `Sampler.refresh`. Adapters are kept by digest, so a version can never get another's."""
        self._snapshots.uris[digest] = snapshot_uri
        with suppress(NoRoomError), self._lease(digest):
            pass  # what cannot be read is refused now, not when it is sampled
        self._digests[version] = digest

    def release(self, version: str) -> None:
        """See `Sampler.release`."""
        digest = self._digests.pop(version, None)
        if digest is not None and digest not in self._digests.values() and not self._generation.uses(digest):
            self._snapshots.uris.pop(digest, None)

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[SampledSequence]]:
        """See `Sampler.sample`. Requests of all versions and all shapes of sampling share a batch."""
        for request in requests:
            self.check(request)
        tickets = [self.submit(request) for request in requests]
        try:
            while any(ticket.outcome is None for ticket in tickets):
                self.step()
        except BaseException:
            for ticket in tickets:
                self.cancel(ticket)
            raise
        results = []
        for ticket in tickets:
            if isinstance(ticket.outcome, OpenTinkerError):
                raise ticket.outcome
            assert ticket.outcome is not None
            results.append(ticket.outcome)
        return results

    def submit(self, request: SampleRequest) -> Ticket:
        """Hand in a request that was checked; `step` gives its ticket an outcome."""
        digest = BASE if request.version == BASE else self._digests[request.version]
        return self._generation.submit(request, digest)

    def step(self) -> None:
        """Move all tickets on by one pass through the model."""
        self._generation.step()

    def cancel(self, ticket: Ticket) -> None:
        """Drop a ticket that is not done."""
        self._generation.cancel(ticket)

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
        room = self.max_context - len(request.prompt_tokens)
        if room < 1:
            raise UsageError(
                f"prompt: {len(request.prompt_tokens)} tokens; accepted: fewer than the context of "
                f"{self.max_context}"
            )
        if request.params.max_tokens > room:
            raise UsageError(
                f"max_tokens: {request.params.max_tokens} after a prompt of {len(request.prompt_tokens)} "
                f"tokens; accepted: at most {room}, so that both fit the context of {self.max_context}"
            )
        self._check_tokens(request)
        if request.params.stop and self._tokenizer is None:
            raise UsageError(f"stop: {request.params.stop!r} without a tokenizer; accepted: ()")
        if not self._generation.fits(request):
            raise UsageError(
                f"max_tokens: {request.params.max_tokens} after a prompt of {len(request.prompt_tokens)} "
                "tokens do not fit the memory for keys and values (runtime.kv_memory_gb)"
            )

    def _check_tokens(self, request: SampleRequest) -> None:
        """Refuse ids the model does not know: they would break the step that all requests share."""
        question = request.about_prompt or PromptQuestion()
        for name, tokens, least in (
            ("prompt_tokens", request.prompt_tokens, 0),
            ("targets", [token for row in question.targets for token in row], -1),
        ):
            if tokens and not least <= min(tokens) <= max(tokens) < self._vocabulary:
                wrong = next(token for token in tokens if not least <= token < self._vocabulary)
                raise UsageError(f"{name}: {wrong}; accepted: {least} to {self._vocabulary - 1}")
        if question.targets and len(question.targets) != len(request.prompt_tokens) - 1:
            raise UsageError(
                f"targets: {len(question.targets)} rows; accepted: {len(request.prompt_tokens) - 1}, "
                "one for each token of the prompt but the first"
            )
        if len({len(row) for row in question.targets}) > 1:
            raise UsageError("targets: rows of different lengths; accepted: as many tokens in each")
        if request.top_logprobs > self._vocabulary:
            raise UsageError(
                f"top_logprobs: {request.top_logprobs}; accepted: at most {self._vocabulary}, "
                "the model's vocabulary"
            )

    def _lease(self, digest: str) -> AbstractContextManager[Adapter]:
        return self._adapters.lease(digest)
