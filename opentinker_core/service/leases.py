"""Which versions the samplers have: each as long as somebody wants it, and a while longer."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from opentinker_core.policies.types import PolicyVersion
from opentinker_core.service.samplers import AsyncSampler

IDLE_VERSIONS = 64
"""Versions nobody wants right now that stay known to samplers: who asks again does not wait for a refresh."""


@dataclass(eq=False)
class _Lease:
    sampler: AsyncSampler
    refreshing: "asyncio.Task[None]"
    users: int = 0


class VersionLeases:
    """Counts the users of each version; used by the event loop's thread alone.

    Releasing says only that the name is not asked for any more: adapters stay in the sampler's memory by
    bytes, the least recently used evicted, whether their versions are held or not.
    """

    def __init__(self, idle_versions: int = IDLE_VERSIONS) -> None:
        self._idle_versions = idle_versions
        self._leases: OrderedDict[str, _Lease] = OrderedDict()
        """By subject, the least recently wanted first."""
        self._releasing: set[asyncio.Task[None]] = set()

    @property
    def users(self) -> dict[str, int]:
        """Of each version that samplers have, how many want it right now."""
        return {subject: lease.users for subject, lease in self._leases.items()}

    @asynccontextmanager
    async def hold(
        self, sampler: AsyncSampler, subject: str, version: PolicyVersion | None
    ) -> AsyncIterator[None]:
        """Keep a version ready to be sampled by the name `subject`; the base model always is.

        Raises:
            SnapshotError: its snapshot is missing or corrupt.
        """
        if version is None:
            yield
            return
        lease = self._leases.get(subject) or self._begin(sampler, subject, version)
        self._leases.move_to_end(subject)
        lease.users += 1
        try:
            await asyncio.shield(lease.refreshing)  # others may wait for it too
            yield
        finally:
            lease.users -= 1
            self._release_idle()

    async def close(self) -> None:
        """Wait for what is being released."""
        await asyncio.gather(*self._releasing, return_exceptions=True)

    def _begin(self, sampler: AsyncSampler, subject: str, version: PolicyVersion) -> _Lease:
        snapshot = version.sampler
        refreshing = asyncio.ensure_future(sampler.refresh(subject, snapshot.uri, snapshot.digest))
        lease = self._leases[subject] = _Lease(sampler, refreshing)

        def settle(task: "asyncio.Task[None]") -> None:
            if task.cancelled() or task.exception() is not None:  # who asks next tries again
                self._leases.pop(subject, None)

        refreshing.add_done_callback(settle)
        return lease

    def _release_idle(self) -> None:
        """Release what nobody has wanted for longest."""
        idle = [name for name, lease in self._leases.items() if not lease.users and lease.refreshing.done()]
        for name in idle[: max(0, len(idle) - self._idle_versions)]:
            lease = self._leases.pop(name)
            releasing = asyncio.ensure_future(lease.sampler.release(name))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)
