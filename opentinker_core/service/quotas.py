"""How much of the service a tenant may use at once, and by the minute."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from opentinker_core.config.serving import QuotaConfig, QuotasConfig
from opentinker_core.service.errors import Forbidden, QuotaError, Unavailable

_GB = 10**9
_BUSY_RETRY_S = 1.0


@dataclass
class _Use:
    """What a tenant uses now."""

    running: int = 0
    tokens: float = 0.0
    """Tokens that may still be used; below zero where work turned out larger than what was left."""
    counted_at: float = field(default=0.0)


class Hold:
    """A unit of work that counts as running until `end`; also a context manager."""

    def __init__(self, quotas: "Quotas", tenant: str) -> None:
        self._quotas = quotas
        self._tenant = tenant
        self._ended = False

    def end(self, tokens: int = 0) -> None:
        """The work is done, and took `tokens` beyond those told at admission. A second call does nothing."""
        if not self._ended:
            self._ended = True
            self._quotas._end(self._tenant, tokens)

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Quotas:
    """Admission of work, by tenant. Thread-safe. Whatever starts work on an engine asks `admit` first."""

    def __init__(self, config: QuotasConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._uses: dict[str, _Use] = {}
        self._closed = False

    def of(self, tenant: str) -> QuotaConfig:
        """The quotas of a tenant."""
        return self._config.of(tenant)

    @property
    def running(self) -> int:
        """Units of work of all tenants that are not done."""
        with self._lock:
            return sum(use.running for use in self._uses.values())

    def close(self) -> None:
        """Admit nothing more: the server is stopping."""
        with self._lock:
            self._closed = True

    def admit(self, tenant: str, tokens: int = 0) -> Hold:
        """Count a unit of work, such as a training operation; it takes `tokens`, as far as is known.

        Work is admitted while there are tokens left, and may be larger than what is left: then the tenant
        waits until the debt is paid.

        Raises:
            QuotaError: too much of the tenant is running, or its tokens of this minute are used up.
            Unavailable: the server is stopping.
        """
        quota = self.of(tenant)
        with self._lock:
            if self._closed:
                raise Unavailable("the server is stopping; ask again in a moment")
            use = self._use(tenant, quota)
            if quota.concurrent_requests and use.running >= quota.concurrent_requests:
                raise QuotaError(
                    f"quota concurrent_requests: {use.running} of this tenant's requests are running; "
                    f"accepted: up to {quota.concurrent_requests}",
                    _BUSY_RETRY_S,
                )
            if quota.tokens_per_minute and use.tokens <= 0:
                wait = (1 - use.tokens) * 60 / quota.tokens_per_minute
                raise QuotaError(
                    f"quota tokens_per_minute: used up; accepted: {quota.tokens_per_minute} a minute, again "
                    f"in {wait:.1f} s",
                    wait,
                )
            use.running += 1
            use.tokens -= tokens
        return Hold(self, tenant)

    def check_policies(self, tenant: str, existing: int) -> None:
        """Refuse a further policy where a tenant trains `existing` ones already.

        Raises:
            Forbidden: its quota is reached.
        """
        limit = self.of(tenant).policies
        if limit and existing >= limit:
            raise Forbidden(
                f"quota policies: this tenant trains {existing} policies; accepted: up to {limit} at once. "
                "End a session that is not used any more"
            )

    def check_storage(self, tenant: str, stored_bytes: int) -> None:
        """Refuse to save more where a tenant's snapshots take `stored_bytes`.

        Raises:
            Forbidden: its quota is reached.
        """
        limit = self.of(tenant).storage_gb
        if limit and stored_bytes >= limit * _GB:
            raise Forbidden(
                f"quota storage_gb: this tenant's checkpoints take {stored_bytes / _GB:.3f} GB; accepted: up "
                f"to {limit:g} GB. Delete checkpoints that are not needed any more"
            )

    def _use(self, tenant: str, quota: QuotaConfig) -> _Use:
        """What the tenant uses, with the tokens that came back since it was asked last. Needs the lock."""
        now = self._clock()
        use = self._uses.get(tenant)
        if use is None:
            use = self._uses[tenant] = _Use(tokens=quota.tokens_per_minute, counted_at=now)
        gained = (now - use.counted_at) * quota.tokens_per_minute / 60
        use.tokens = min(float(quota.tokens_per_minute), use.tokens + gained)
        use.counted_at = now
        return use

    def _end(self, tenant: str, tokens: int) -> None:
        with self._lock:
            use = self._use(tenant, self.of(tenant))
            use.running -= 1
            use.tokens -= tokens
