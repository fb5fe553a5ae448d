"""The phases of a generation over all policies: rollout → update → refresh, with a barrier after each."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol

from opentinker_core.agents.coordination.actors import Deadline
from opentinker_core.agents.coordination.coordinator import EpisodeResult
from opentinker_core.agents.coordination.log import EventLog, Kind
from opentinker_core.agents.coordination.protocol import CoordinationProtocol, Phase
from opentinker_core.errors import OpenTinkerError, UsageError


class PhaseError(OpenTinkerError):
    """A phase did not end in all policies; none has gone on to the next."""

    def __init__(self, phase: Phase, generation: int, policies: Sequence[str], why: str) -> None:
        whose = f" of {', '.join(policies)}" if any(policies) else ""
        super().__init__(f"{phase}{whose} in generation {generation}: {why}")
        self.phase = phase
        self.policies = tuple(policies)


class Phases(Protocol):
    """What is done in each phase. One deadline object is passed down each."""

    async def rollout(
        self, generation: int, versions: Mapping[str, str], deadline: Deadline
    ) -> Sequence[EpisodeResult]:
        """Play the episodes of a generation with these versions (by policy)."""
        ...

    async def update(self, policy: str, episodes: Sequence[EpisodeResult], deadline: Deadline) -> None:
        """Train one policy on its agents' turns."""
        ...

    async def refresh(self, policy: str, deadline: Deadline) -> str:
        """Publish what the update made; returns the version that is served from now on."""
        ...


class PhaseCoordinator:
    """Leads all policies through the phases, and says which versions a generation samples from."""

    def __init__(
        self, protocol: CoordinationProtocol, phases: Phases, log: EventLog, versions: Mapping[str, str]
    ) -> None:
        """`versions`: by policy, what the first generation samples from.

        Raises:
            UsageError: a policy has no version.
        """
        missing = sorted(set(protocol.policies.values()) - set(versions))
        if missing:
            raise UsageError(f"versions: policy {missing[0]!r} has none; accepted: one a policy")
        self.protocol = protocol
        self.log = log
        self.generation = 0
        self.versions = dict(versions)
        self._phases = phases
        for policy, version in self.versions.items():
            detail = {"phase": str(Phase.REFRESH), "policy": policy}
            log.append(Kind.PHASE_ENDED, -1, version=version, detail=detail)

    async def run(self, generations: int) -> None:
        """So many generations, one after the other.

        Raises:
            PhaseError: a phase failed or was late in a policy, or too few episodes have rewards.
        """
        for _ in range(generations):
            await self._generation()

    async def _generation(self) -> None:
        episodes = await self._rollout()
        trained, limits = self.protocol.trained, self.protocol.phase_s
        until = Deadline.after(limits.update)
        updates = {policy: self._update(policy, episodes, until) for policy in trained}
        await self._all(Phase.UPDATE, updates, until)
        until = Deadline.after(limits.refresh)
        refreshes = {policy: self._refresh(policy, until) for policy in trained}
        self._advance(await self._all(Phase.REFRESH, refreshes, until))

    def _advance(self, fresh: Mapping[str, str]) -> None:
        """All policies are refreshed: the next generation samples from these versions."""
        self.versions.update(fresh)
        self.generation += 1

    async def _rollout(self) -> Sequence[EpisodeResult]:
        deadline = Deadline.after(self.protocol.phase_s.rollout)
        playing = self._phases.rollout(self.generation, dict(self.versions), deadline)
        noted = self._noted(Phase.ROLLOUT, "", playing)
        found = await self._all(Phase.ROLLOUT, {"": noted}, deadline)
        episodes: Sequence[EpisodeResult] = found[""]
        usable = sum(episode.end.counts for episode in episodes)
        if usable < self.protocol.usable_episodes * len(episodes):
            why = f"only {usable} of {len(episodes)} episodes have rewards"
            raise PhaseError(Phase.ROLLOUT, self.generation, (), why)
        return episodes

    async def _update(self, policy: str, episodes: Sequence[EpisodeResult], deadline: Deadline) -> None:
        await self._noted(Phase.UPDATE, policy, self._phases.update(policy, episodes, deadline))

    async def _refresh(self, policy: str, deadline: Deadline) -> str:
        version: str = await self._noted(Phase.REFRESH, policy, self._phases.refresh(policy, deadline))
        return version

    async def _noted(self, phase: Phase, policy: str, work: Coroutine[Any, Any, Any]) -> Any:
        """Log when the work of a phase begins, and when it has ended."""
        generation, detail = self.generation, {"phase": str(phase), "policy": policy}
        self.log.append(Kind.PHASE_BEGAN, generation, detail=detail)
        result = await work
        version = result if phase is Phase.REFRESH else ""
        self.log.append(Kind.PHASE_ENDED, generation, version=version, detail=detail)
        return result

    async def _all(
        self, phase: Phase, work: Mapping[str, Coroutine[Any, Any, Any]], deadline: Deadline
    ) -> dict[str, Any]:
        """The barrier: everybody's part of a phase has ended; if one fails, the others are cancelled."""
        tasks = {policy: asyncio.create_task(part) for policy, part in work.items()}
        if not tasks:
            return {}
        try:
            await asyncio.wait(
                tasks.values(), timeout=deadline.remaining, return_when=asyncio.FIRST_EXCEPTION
            )
            for policy, task in tasks.items():
                if task.done() and (task.cancelled() or task.exception()):
                    cause = None if task.cancelled() else task.exception()
                    why = "was cancelled" if cause is None else f"{type(cause).__name__}: {cause}"
                    raise PhaseError(phase, self.generation, (policy,), why) from cause
            late = [policy for policy, task in tasks.items() if not task.done()]
            if late:
                raise PhaseError(phase, self.generation, late, "not done by its deadline")
        finally:
            for task in tasks.values():
                task.cancel()
        return {policy: task.result() for policy, task in tasks.items()}
