"""The endpoints of one client: which of them work, and which adapters each has loaded."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from opentinker_core.errors import OpenTinkerError
from opentinker_core.sampling.vllm.balance import Balancer
from opentinker_core.sampling.vllm.endpoint import AdapterMissingError, Endpoint, EndpointError

logger = logging.getLogger(__name__)

_PROBE_EVERY_S = 1.0


class _Member:
    """An endpoint with what is known of it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.loaded: set[str] = set()
        self.locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self.lock = threading.Lock()
        self.failure: EndpointError | None = None
        self.probed = 0.0


class Fleet:
    """Endpoints that serve the same base model."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        check: Callable[[Endpoint], object],
        recovery_s: float,
        broken: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`check` raises if an endpoint is not to be used; it is asked again of one that came back.

        Args:
            recovery_s: how long to wait for an endpoint when none works.
            broken: says why none will come back, if so.
        """
        self.endpoints = list(endpoints)
        self._members = [_Member(endpoint) for endpoint in endpoints]
        self._check = check
        self._recovery_s = recovery_s
        self._broken = broken
        self._balancer = Balancer(len(endpoints))
        self._closed = False

    def begin(self, version: str, prompt: Sequence[int]) -> int:
        """The index of a working endpoint for a completion; waits for one if there is none.

        Raises:
            OpenTinkerError: none came back in time.
        """
        return self._balancer.begin(version, prompt, self._usable())

    def end(self, index: int) -> None:
        """Say that a completion of an endpoint ended."""
        self._balancer.end(index)

    def running(self) -> list[int]:
        """Completions that run, by endpoint."""
        return self._balancer.running()

    def failed(self, index: int, error: EndpointError) -> None:
        """Say that a request failed: the endpoint is not used until it answers again."""
        member = self._members[index]
        with member.lock:
            if member.failure is None:
                logger.warning("%s; its completions are asked for again", error)
            member.failure = error
            # One that misses an adapter answers: it is asked at once what it has.
            member.probed = 0.0 if isinstance(error, AdapterMissingError) else time.monotonic()

    def ensure(self, index: int, name: str, directory: Path) -> None:
        """Load an adapter on an endpoint unless it is there.

        Raises:
            UsageError: the server refuses it.
            EndpointError: the server fails.
        """
        member = self._members[index]
        if name in member.loaded:
            return
        with member.lock:
            lock = member.locks[name]
        with lock:
            if name not in member.loaded:
                member.endpoint.load(name, directory)
                member.loaded.add(name)

    def ensure_everywhere(self, name: str, directory: Path) -> None:
        """Load an adapter on every endpoint that works; the others get it when they are back.

        Raises:
            UsageError: a server refuses it.
            OpenTinkerError: none works.
        """
        done = False
        last: EndpointError | None = None
        for _ in range(3):
            for index in self._usable():
                try:
                    self.ensure(index, name, directory)
                    done = True
                except EndpointError as error:
                    self.failed(index, error)
                    last = error
            if done:
                return
        raise OpenTinkerError(f"no endpoint could load the adapter {name}: {last}")

    def unload(self, name: str) -> None:
        """Forget an adapter on every endpoint; one that does not answer will have forgotten it."""
        for index, member in enumerate(self._members):
            if name not in member.loaded:
                continue
            member.loaded.discard(name)
            try:
                member.endpoint.unload(name)
            except EndpointError as error:
                self.failed(index, error)
            with member.lock:
                member.locks.pop(name, None)

    def close(self) -> None:
        """Unload what was loaded, where the server still answers, and wait for none any more."""
        self._closed = True
        for name in {name for member in self._members for name in member.loaded}:
            self.unload(name)

    def _usable(self) -> list[int]:
        deadline = time.monotonic() + self._recovery_s
        while True:
            usable = [index for index, member in enumerate(self._members) if self._works(member)]
            if usable:
                return usable
            reason = "the sampler is closed" if self._closed else self._broken()
            if reason is not None or time.monotonic() > deadline:
                said = "; ".join(str(member.failure) for member in self._members)
                raise OpenTinkerError(f"no vLLM server works: {reason or said}")
            time.sleep(0.2)

    def _works(self, member: _Member) -> bool:
        """Whether it works; one that failed is asked again from time to time."""
        if member.failure is None:
            return True
        with member.lock:
            if member.failure is None:
                return True
            if time.monotonic() - member.probed < _PROBE_EVERY_S:
                return False
            member.probed = time.monotonic()
            try:
                member.endpoint.check_health()
                self._check(member.endpoint)
                # If it was started anew, its adapters are gone; if not, loading them again does no harm.
                member.loaded &= member.endpoint.adapters()
            except EndpointError as error:
                member.failure = error
                return False
            member.failure = None
            return True
