"""Finds out from the log alone whether a run was coordinated as its protocol says.

Order, answers, messages and rewards of each episode are recomputed in `episode_check`; barriers and
versions of the phases here.
"""

from collections.abc import Iterable, Mapping

from envs.multi import Recomputes
from opentinker_core.agents.coordination.episode_check import EpisodeCheck, Versions
from opentinker_core.agents.coordination.log import Event, Kind
from opentinker_core.agents.coordination.protocol import CoordinationProtocol, Phase
from opentinker_core.agents.coordination.violations import Check, Violation


def check(
    log: Iterable[Event], protocol: CoordinationProtocol, recomputes: Recomputes | None = None
) -> list[Violation]:
    """All violations in a log.

    `recomputes`: tells rewards from actions alone. Without it they are compared with those that
    the environment gave.
    """
    events = list(log)
    versions = _versions(events, protocol)
    found = _phases(events, protocol)
    episodes: dict[str, EpisodeCheck] = {}
    for event in events:
        if event.episode:
            if event.episode not in episodes:
                episodes[event.episode] = EpisodeCheck(protocol, versions, event.episode)
            episodes[event.episode].take(event)
    for episode in episodes.values():
        found += episode.finish(recomputes)
    return found


def _versions(events: Iterable[Event], protocol: CoordinationProtocol) -> Versions:
    """What a policy is sampled from in a generation: from its refreshes, or by the first pin there is.

    Policies that are not trained may play each episode with another version, from its beginning to its end.
    """
    refreshed: dict[tuple[str, int], str] = {}
    pinned: dict[tuple[str, int, str], str] = {}

    def of(policy: str, generation: int, episode: str) -> tuple[str, int, str]:
        return policy, generation, episode if policy in protocol.frozen else ""

    for event in events:
        policy = event.detail.get("policy", "")
        if event.kind is Kind.PHASE_ENDED and event.detail["phase"] == Phase.REFRESH:
            refreshed[policy, event.generation] = event.version
        elif event.kind is Kind.ASKED:
            pinned.setdefault(of(policy, event.generation, event.episode), event.version)

    def version(policy: str, generation: int, episode: str) -> str:
        for earlier in range(generation - 1, -2, -1):  # a frozen policy keeps its version
            if (policy, earlier) in refreshed:
                return refreshed[policy, earlier]
        return pinned.get(of(policy, generation, episode), "")

    return version


def _phases(events: list[Event], protocol: CoordinationProtocol) -> list[Violation]:
    """Each generation's rollout, updates and refreshes, in this order, all of one before any of the next."""
    found: list[Violation] = []
    ended: dict[tuple[int, str], set[str]] = {}
    """By generation and phase: the policies in which it has ended."""
    over: set[str] = set()
    """Episodes that have ended."""
    begun: dict[int, set[str]] = {}
    """By generation: its episodes."""
    phased = any(event.kind is Kind.PHASE_BEGAN for event in events)
    for event in events if phased else ():
        generation, phase = event.generation, event.detail.get("phase", "")
        why = ""
        if event.kind is Kind.PHASE_ENDED:
            ended.setdefault((generation, phase), set()).add(event.detail["policy"])
        elif event.kind is Kind.PHASE_BEGAN:
            why = _too_early(event, protocol, ended)
            if phase == Phase.UPDATE and (open_ := begun.get(generation, set()) - over):
                why = f"update of {event.detail['policy']} begins while {min(open_)} is played"
            if event.detail["policy"] in protocol.frozen:
                found.append(Violation(Check.CREDIT, f"{event.detail['policy']} is frozen", "", event.number))
        elif event.kind is Kind.ENDED:
            over.add(event.episode)
        elif event.kind in (Kind.OPENED, Kind.ASKED):
            begun.setdefault(generation, set()).add(event.episode)
            behind = set(protocol.trained) - ended.get((generation - 1, Phase.REFRESH), set())
            if behind:
                why = f"plays before the refresh of {min(behind)}"
        if why:
            found.append(Violation(Check.GLOBAL_BARRIER, why, event.episode, event.number))
    return found


def _too_early(
    event: Event, protocol: CoordinationProtocol, ended: Mapping[tuple[int, str], set[str]]
) -> str:
    """Why a phase may not begin yet; empty: it may."""
    phase = Phase(event.detail["phase"])
    everybody = set(protocol.trained)
    before = {
        Phase.ROLLOUT: (event.generation - 1, Phase.REFRESH, everybody),
        Phase.UPDATE: (event.generation, Phase.ROLLOUT, {""}),
        Phase.REFRESH: (event.generation, Phase.UPDATE, everybody),
    }
    generation, earlier, who = before[phase]
    behind = who - ended.get((generation, earlier), set())
    if not behind:
        return ""
    whose = f" of {min(behind)}" if any(behind) else ""
    return f"{phase} of generation {event.generation} begins before the {earlier}{whose} has ended"
