"""The log of a coordinated run: append only, each event sealed by a digest over all before it.

Nouns: `Kind` of event, `Event`, `EventLog`. Most kinds are *facts*, written where they happen, by
`witness`, and not by the coordinator; what it decides itself are *claims*.
"""

import hashlib
import json
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from opentinker_core.digests import canonical_json
from opentinker_core.errors import OpenTinkerError

_START = "0" * 64


class Kind(StrEnum):
    """What happened. `detail` of each is named in its line."""

    OPENED = "opened"
    """Fact: the environment was reset: seed, agents, to_act, together, observations."""
    STEPPED = "stepped"
    """Fact: the environment took actions: actions, to_act, together, observations, rewards."""
    BROKE = "broke"
    """Fact: the environment raised: error, and actions unless it was being reset."""
    ASKED = "asked"
    """Fact: an agent was asked for an attempt at a turn: policy, shown; `version`: the pinned one."""
    ACTED = "acted"
    """Fact: it answered: text; `version`: the one that was sampled from."""
    RAISED = "raised"
    """Fact: its attempt failed: error; full: because what it was shown did not fit its model's context."""
    PHASE_BEGAN = "phase_began"
    """Fact: a policy's update or refresh, or the rollout of all (policy: empty): phase, policy."""
    PHASE_ENDED = "phase_ended"
    """Fact: it ended: phase, policy; of a refresh, `version`: what is served from now on."""
    GAVE_UP = "gave_up"
    """Claim: an attempt is dead, and its answer, should it still come, is ignored: why."""
    DIED = "died"
    """Claim: an agent has used up its attempts, or leaves because its context is full (`context`): why."""
    CREDITED = "credited"
    """Claim: what trains an agent's policy: policy, reward (None: missing), turns."""
    ENDED = "ended"
    """Claim: the episode is over: reason."""


class EpisodeEnd(StrEnum):
    """Why a coordinated episode ended. In the first three rewards count, in the others all are missing."""

    DONE = "done"
    """The environment said so."""
    MAX_ROUNDS = "max_rounds"
    """The limit was reached: truncated."""
    CONTEXT = "context"
    """What an agent was to be shown did not fit its model's context: truncated."""
    AGENT_DIED = "agent_died"
    """As the protocol says: `on_death: end`."""
    QUORUM_LOST = "quorum_lost"
    """Too few agents live."""
    DEADLINE = "deadline"
    """The episode's time was over."""
    OUT_OF_ORDER = "out_of_order"
    """The environment asked for agents that the declared order does not let act."""
    ENVIRONMENT_FAILED = "environment_failed"
    """It raised."""
    CANCELLED = "cancelled"
    """From outside."""

    @property
    def counts(self) -> bool:
        """Whether the rewards of an episode that ended so are used."""
        return self in (EpisodeEnd.DONE, EpisodeEnd.MAX_ROUNDS, EpisodeEnd.CONTEXT)


@dataclass(frozen=True)
class Event:
    """One line of the log."""

    kind: Kind
    generation: int
    """Of the policies' versions: it grows when the last of them is refreshed."""
    episode: str = ""
    round: int = -1
    """Steps that the environment had taken; -1: does not apply."""
    agent: str = ""
    attempt: int = 0
    """At one turn, from 1; 0: does not apply."""
    version: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    """JSON values."""
    number: int = -1
    """Place in the log, given by it."""
    digest: str = ""
    """Of this event and, through their digests, of all before it."""


class EventLog:
    """Events in the order in which they happened; nothing is ever changed or taken away. Thread-safe."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._noted: deque[tuple[Kind, int, bytes, dict[str, Any]]] = deque()
        """What came since somebody last looked. Most logs are of episodes with one agent, and nobody does:
        numbers and digests, which cost the most, are given when they are asked for."""
        self._sealing = threading.Lock()

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._sealed()))

    def __len__(self) -> int:
        return len(self._sealed())

    @property
    def digest(self) -> str:
        """Of the whole log."""
        return _last_digest(self._sealed())

    def append(self, kind: Kind, generation: int, **fields: Any) -> None:
        """Add an event; the log gives it its number and digest.

        Raises:
            ValueError, TypeError: `detail` is not made of JSON values.
        """
        # as JSON: later changes of what was passed do not reach the log
        self._noted.append((kind, generation, canonical_json(fields.pop("detail", {})), fields))

    def _sealed(self) -> list[Event]:
        """All events, those that were noted included."""
        with self._sealing:
            while self._noted:
                kind, generation, text, fields = self._noted.popleft()
                number = len(self._events)
                event = Event(kind, generation, detail=json.loads(text), number=number, **fields)
                # set on the new event before anybody has it; a second one costs as much as all else here
                object.__setattr__(event, "digest", _seal(event, text, _last_digest(self._events)))
                self._events.append(event)
            return self._events

    def lines(self) -> Iterator[str]:
        """One JSON object an event."""
        return (json.dumps(asdict(event), sort_keys=True) for event in self)

    def write(self, path: Path) -> None:
        """Write all events as JSON lines."""
        path.write_text("".join(f"{line}\n" for line in self.lines()))

    @classmethod
    def read(cls, lines: Iterable[str]) -> "EventLog":
        """The log that `lines` wrote.

        Raises:
            OpenTinkerError: a line is no event, or does not follow from those before it.
        """
        log = cls()
        for number, line in enumerate(lines):
            try:
                values = json.loads(line)
                event = Event(**{**values, "kind": Kind(values["kind"])})
            except (ValueError, TypeError, KeyError) as error:
                raise OpenTinkerError(f"log: line {number + 1} is no event: {line!r:.80}") from error
            if event.number != number or event.digest != _seal(
                event, canonical_json(event.detail), log.digest
            ):
                raise OpenTinkerError(f"log: line {number + 1} was changed, or lines before it are missing")
            log._events.append(event)
        return log


def _last_digest(events: Sequence[Event]) -> str:
    return events[-1].digest if events else _START


def _seal(event: Event, detail: bytes, before: str) -> str:
    """The digest of an event after that of the one before it; `detail`: its own, as JSON."""
    head = [before, event.number, event.kind, event.generation, event.episode, event.round]
    head += [event.agent, event.attempt, event.version]
    return hashlib.sha256(canonical_json(head) + detail).hexdigest()
