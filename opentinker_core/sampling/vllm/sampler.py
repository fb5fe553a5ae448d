"""The `Sampler` over vLLM's servers: token ids in, token ids and their logprobs out.

Every version gets a name of its own on the servers, of policy, number, digest, client and a serial number,
and names are never used again: what a name means cannot change, and no cache of a server can be stale.
Each completion is one request with its own seed.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.sampling.protocol import BASE, SampledSequence, SampleRequest
from opentinker_core.sampling.vllm.endpoint import EndpointError, EndpointGoneError
from opentinker_core.sampling.vllm.files import AdapterFiles
from opentinker_core.sampling.vllm.fleet import Fleet
from opentinker_core.sampling.vllm.wire import check_request, to_body, to_sequence

_TRIES = 3
"""How often a completion may be broken off before it is given up; a request may be what ends the server."""


@dataclass(frozen=True)
class _Adapter:
    """What stands for a version on the servers."""

    name: str
    digest: str
    directory: Path


class VLLMSampler:
    """See `Sampler`. May be called from many threads; `close` ends it."""

    def __init__(
        self,
        fleet: Fleet,
        files: AdapterFiles,
        *,
        base: str,
        with_adapters: bool,
        max_context: int,
        max_concurrent: int,
        ending: Callable[[], None] = lambda: None,
    ) -> None:
        """Use `fleet`; `ending` is called by `close` when no request will be sent any more.

        Args:
            base: the served name of the base model.
            with_adapters: whether the servers take adapters; if not, they sample the base model alone.

        Raises:
            UsageError: the servers refuse adapters.
            OpenTinkerError: none answers.
        """
        self.max_context = max_context
        self._fleet, self._files, self._base, self._ending = fleet, files, base, ending
        self._served: dict[str, _Adapter] = {}
        self._in_use: Counter[str] = Counter()
        self._released: dict[str, _Adapter] = {}
        self._serial = itertools.count()
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._pool = ThreadPoolExecutor(max_concurrent, thread_name_prefix="vllm-request")
        self._closed = False
        self._zero: _Adapter | None = None
        if with_adapters:
            name = f"zero-{files.client}"
            self._zero = _Adapter(name, "", files.write_zero(name))
            fleet.ensure_everywhere(name, self._zero.directory)

    def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        """See `Sampler.refresh`: the adapter is on every working server when this returns.

        Raises:
            UsageError: vLLM does not sample such an adapter rightly.
        """
        if self._zero is None:
            raise UsageError(
                f"runtime.vllm.max_loras: 0, so {version} cannot be served; accepted: at least 2"
            )
        with self._refreshing:
            known = self._served.get(version)
            if known is not None and known.digest == digest:
                return
            if known is not None:
                raise UsageError(
                    f"version: {version!r} is served with another digest; accepted: a new number"
                )
            name = f"{version.replace('@', '-')}-{digest[:16]}-{self._files.client}-{next(self._serial)}"
            adapter = _Adapter(name, digest, self._files.write(name, snapshot_uri, digest))
            try:
                self._fleet.ensure_everywhere(name, adapter.directory)
            except BaseException:
                self._fleet.unload(name)
                self._files.discard(adapter.directory)
                raise
            with self._lock:
                self._served[version] = adapter

    def release(self, version: str) -> None:
        """See `Sampler.release`: it is unloaded when its last request has ended."""
        with self._lock:
            adapter = self._served.pop(version, None)
            if adapter is None:
                return
            self._released[adapter.name] = adapter
        self._unload_unused()

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[SampledSequence]]:
        """See `Sampler.sample`.

        Raises:
            OpenTinkerError: no server works, for longer than the time to start one.
        """
        for request in requests:
            check_request(request, self.max_context)
        adapters = self._lease(requests)
        futures = [
            [self._pool.submit(self._leased, request, seed, adapter) for seed in request.seeds]
            for request, adapter in zip(requests, adapters, strict=True)
        ]
        try:
            for future in wait(itertools.chain(*futures), return_when=FIRST_EXCEPTION).done:
                future.result()  # one that failed raises, before the others are waited for
            return [[future.result() for future in row] for row in futures]
        finally:
            for row, adapter in zip(futures, adapters, strict=True):
                self._return(adapter, sum(future.cancel() for future in row))

    def running(self) -> list[int]:
        """Completions that run right now, by endpoint."""
        return self._fleet.running()

    def close(self) -> None:
        """End at once: requests that run on servers of our own are broken off. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._fleet.close()
        self._ending()
        self._pool.shutdown()
        for endpoint in self._fleet.endpoints:
            endpoint.close()
        self._files.close()

    def _lease(self, requests: Sequence[SampleRequest]) -> list[_Adapter | None]:
        """The adapter of each request, counted as in use once a completion."""
        adapters = []
        with self._lock:
            if self._closed:
                raise OpenTinkerError("the vLLM sampler is closed")
            for request in requests:
                if request.version != BASE and request.version not in self._served:
                    known = ", ".join([BASE, *list(self._served)[-10:]])
                    raise UsageError(f"version: {request.version!r} is not served; accepted: {known}")
            for request in requests:
                adapter = self._zero if request.version == BASE else self._served[request.version]
                adapters.append(adapter)
                if adapter is not None:
                    self._in_use[adapter.name] += len(request.seeds)
        return adapters

    def _return(self, adapter: _Adapter | None, count: int = 1) -> None:
        if adapter is not None and count:
            with self._lock:
                self._in_use[adapter.name] -= count
            self._unload_unused()

    def _leased(self, request: SampleRequest, seed: int, adapter: _Adapter | None) -> SampledSequence:
        try:
            return self._complete(request, seed, adapter)
        finally:
            self._return(adapter)

    def _complete(self, request: SampleRequest, seed: int, adapter: _Adapter | None) -> SampledSequence:
        """One completion, on whichever endpoint gives it; the same seed gives the same tokens on each."""
        body = to_body(request, adapter.name if adapter else self._base, seed)
        broken_off = 0
        while True:
            index = self._fleet.begin(request.version, request.prompt_tokens)
            try:
                if adapter is not None:
                    self._fleet.ensure(index, adapter.name, adapter.directory)
                return to_sequence(request, self._fleet.endpoints[index].complete(body))
            except EndpointError as error:
                self._fleet.failed(index, error)
                broken_off += not isinstance(error, EndpointGoneError)
                if broken_off == _TRIES:
                    raise
            finally:
                self._fleet.end(index)

    def _unload_unused(self) -> None:
        with self._lock:
            unused = [adapter for adapter in self._released.values() if not self._in_use[adapter.name]]
            for adapter in unused:
                del self._released[adapter.name], self._in_use[adapter.name]
        for adapter in unused:
            self._fleet.unload(adapter.name)
            self._files.discard(adapter.directory)
