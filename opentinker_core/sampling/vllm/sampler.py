"""The `Sampler` over vLLM's servers: token ids in, token ids and their logprobs out.

Every version gets a name of its own on the servers, of policy, number, digest, client and a serial number,
and names are never used again: what a name means cannot change, and no cache of a server can be stale.
Each completion is one request with its own seed.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from opentinker_core.errors import UsageError
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
        with self._leases(requests) as adapters:
            futures = [
                [self._pool.submit(self._complete, r, seed, adapters[r.version]) for seed in r.seeds]
                for r in requests
            ]
            every = [future for row in futures for future in row]
            try:
                for future in wait(every, return_when=FIRST_EXCEPTION).done:
                    future.result()  # one that failed raises, before the others are waited for
                return [[future.result() for future in row] for row in futures]
            finally:
                for future in every:
                    future.cancel()
                wait(every)

    def close(self) -> None:
        """Unload all adapters and end; requests that run are waited for. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._pool.shutdown(cancel_futures=True)
        self._fleet.close()
        self._ending()
        self._files.close()

    @contextmanager
    def _leases(self, requests: Sequence[SampleRequest]) -> Iterator[dict[str, _Adapter | None]]:
        """The adapters of the requests' versions, which stay loaded meanwhile."""
        versions = {request.version for request in requests}
        with self._lock:
            for version in versions - {BASE}:
                if version not in self._served:
                    known = ", ".join([BASE, *list(self._served)[-10:]])
                    raise UsageError(f"version: {version!r} is not served; accepted: {known}")
            adapters: dict[str, _Adapter | None] = {v: self._served[v] for v in versions - {BASE}}
            adapters[BASE] = self._zero
            names = [adapter.name for adapter in adapters.values() if adapter is not None]
            self._in_use.update(names)
        try:
            yield adapters
        finally:
            with self._lock:
                self._in_use.subtract(names)
            self._unload_unused()

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
