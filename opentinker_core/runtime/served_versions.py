"""Which versions a run has in the sampler of an engine that others use too."""

import threading
from collections import defaultdict

from opentinker_core.policies.types import PolicyVersion
from opentinker_core.sampling.protocol import Sampler


class ServedVersions:
    """A version is released when the last of those who asked for it is done with it. Thread-safe."""

    def __init__(self) -> None:
        self._holders: defaultdict[str, set[str]] = defaultdict(set)
        self._changing = threading.Lock()

    def hold(self, sampler: Sampler, version: PolicyVersion, holder: str) -> None:
        """Let `sampler` serve `version`, for `holder` until it lets go of it; idempotent.

        Raises:
            SnapshotError: as `Sampler.refresh`; then nothing is held.
        """
        with self._changing:
            sampler.refresh(version.ref, version.sampler.uri, version.sampler.digest)
            self._holders[version.ref].add(holder)

    def let_go(self, sampler: Sampler, ref: str, holder: str) -> None:
        """Say that `holder` will not ask for `ref` again; no error if it did not hold it."""
        with self._changing:
            holders = self._holders.get(ref)
            if holders is None or holder not in holders:
                return
            holders.discard(holder)
            if not holders:
                del self._holders[ref]
                sampler.release(ref)

    def held(self) -> list[str]:
        """The versions that somebody holds."""
        with self._changing:
            return sorted(self._holders)
