"""Results that clients fetch later: one future a submission, found again by its key, kept for re-reading."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.policies.database import DatabaseError
from opentinker_core.service.errors import NO_DATABASE
from opentinker_core.service.types import StoredResult

_LOG = logging.getLogger(__name__)

Work = Callable[[], Awaitable[StoredResult]]
"""Does what was submitted and gives what is answered; what it raises becomes a `Failure`."""


@dataclass(frozen=True)
class Failure:
    """Why there is no result; answered as `200 {"error", "category"}`."""

    message: str
    category: str
    """`user` or `server`."""


Outcome = StoredResult | Failure
_EACH = 2_000
"""Bytes of a future itself, about."""
_CANCELLED = Failure("the request was cancelled", "user")


class ResultStore(Protocol):
    """Where results wait for clients that come back late; written behind, in groups."""

    def keep(self, tenant: str, request_id: str, digest: str, result: StoredResult) -> None:
        """Take a result in; returns at once."""
        ...

    async def find(self, tenant: str, request_id: str) -> tuple[str, StoredResult] | None:
        """The digest of the submission and its result."""
        ...


@dataclass(eq=False)
class _Future:
    tenant: str
    digest: str
    kind: str
    task: "asyncio.Task[None] | None" = None
    outcome: Outcome | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    ended_at: float = 0.0
    read_at: float | None = None
    on_failure_seen: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """What it takes, with its result."""
        return _EACH + (len(self.outcome.body) if isinstance(self.outcome, StoredResult) else 0)


class FutureBook:
    """The futures of all tenants. All methods are called on the event loop."""

    def __init__(
        self,
        store: ResultStore | None = None,
        keep_seconds: float = 600.0,
        read_seconds: float = 60.0,
        keep_bytes: int = 512_000_000,
    ) -> None:
        """
        Args:
            keep_seconds: how long an outcome stays in memory that nobody has read.
            read_seconds: how long one stays that was read, and may be asked for again if the answer was lost.
            keep_bytes: of all outcomes; beyond that the oldest go first.
        """
        self._futures: dict[str, _Future] = {}
        self._store, self._keep_bytes = store, keep_bytes
        self._keep_seconds, self._read_seconds = keep_seconds, read_seconds

    def known(self, tenant: str, request_id: str, digest: str) -> bool:
        """Whether this submission was taken before (so that a retry is answered the same).

        Raises:
            UsageError: the id was used for something else.
        """
        future = self._futures.get(request_id)
        if future is None or future.tenant != tenant:
            return False
        if future.digest != digest:
            raise UsageError(
                f"seq_id: {request_id.rpartition(':')[2]} was used for another {future.kind} request; "
                "accepted: the same request again, or the next seq_id"
            )
        return True

    def submit(
        self,
        tenant: str,
        request_id: str,
        kind: str,
        digest: str,
        work: Work,
        on_failure_seen: Callable[[], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> str:
        """Start `work`, unless this submission is known; gives the request id.

        Args:
            request_id: `<model or sampler id>:<seq>`, the same for a retry of the same submission.
            digest: of the submission's parsed content.
            on_failure_seen: called when a client has read that it failed.
            on_end: called once it has ended, in whatever way; at once, if the submission is known.

        Raises:
            UsageError: the id was used for something else.
        """
        if self.known(tenant, request_id, digest):
            if on_end is not None:
                on_end()
            return request_id
        future = self._futures[request_id] = _Future(tenant, digest, kind, on_failure_seen=on_failure_seen)
        future.task = asyncio.get_running_loop().create_task(self._run(request_id, future, work))
        future.task.add_done_callback(lambda _: _ended(future, on_end))
        return request_id

    async def retrieve(self, tenant: str, request_id: str, wait_seconds: float) -> Outcome | None:
        """The outcome, once there is one; None: not within `wait_seconds`.

        Raises:
            KeyError: there is no such future (any more) for this tenant.
        """
        future = self._futures.get(request_id)
        if future is None or future.tenant != tenant:
            found = await self._store.find(tenant, request_id) if self._store else None
            if found is None:
                raise KeyError(request_id)
            return found[1]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(future.done.wait(), wait_seconds)
        if future.outcome is not None:
            future.read_at = time.monotonic()
        if isinstance(future.outcome, Failure) and future.on_failure_seen:
            future.on_failure_seen()
        return future.outcome

    async def cancel(self, tenant: str, request_id: str) -> None:
        """End a future that nobody waits for; nothing happens to one that is done or unknown."""
        future = self._futures.get(request_id)
        if future is not None and future.tenant == tenant and future.task is not None:
            future.task.cancel()

    def forget(self, prefix: str) -> None:
        """Drop the futures of a session, model or sampler that ended; those that run are cancelled."""
        for request_id in [key for key in self._futures if key.startswith(f"{prefix}:")]:
            future = self._futures.pop(request_id)
            if future.task is not None:
                future.task.cancel()

    def sweep(self) -> None:
        """Drop outcomes that were kept for long enough, and the oldest if they are too many."""
        now, kept = time.monotonic(), 0
        done = [(key, one) for key, one in self._futures.items() if one.outcome is not None]
        for key, one in sorted(done, key=lambda item: -item[1].ended_at):
            kept += one.nbytes
            over = now - (one.read_at or now) > self._read_seconds or now - one.ended_at > self._keep_seconds
            if over or kept > self._keep_bytes:
                del self._futures[key]

    @property
    def pending(self) -> int:
        """Futures without an outcome."""
        return sum(one.outcome is None for one in self._futures.values())

    def __len__(self) -> int:
        return len(self._futures)

    def close(self) -> None:
        """End what runs: the server stops."""
        for future in self._futures.values():
            if future.task is not None:
                future.task.cancel()

    async def _run(self, request_id: str, future: _Future, work: Work) -> None:
        try:
            future.outcome = await work()
        except asyncio.CancelledError:
            future.outcome = _CANCELLED
        except UsageError as error:
            future.outcome = Failure(str(error), "user")
        except DatabaseError as error:
            _LOG.warning("%s of %s failed: %s", future.kind, request_id, error)
            future.outcome = Failure(NO_DATABASE, "server")
        except OpenTinkerError as error:
            future.outcome = Failure(str(error), "server")
        except Exception:  # noqa: BLE001 - it is the outcome of the future
            _LOG.exception("%s of %s failed by a defect", future.kind, request_id)
            future.outcome = Failure("an internal error; it is in the server's log", "server")
        finally:
            _ended(future)
        if self._store is not None and isinstance(future.outcome, StoredResult):
            self._store.keep(future.tenant, request_id, future.digest, future.outcome)


def _ended(future: _Future, then: Callable[[], None] | None = None) -> None:
    """Whatever became of its task, which may have been cancelled before it began."""
    if not future.done.is_set():
        future.outcome = future.outcome or _CANCELLED
        future.ended_at = time.monotonic()
        future.task = None
        future.done.set()
    if then is not None:
        then()
