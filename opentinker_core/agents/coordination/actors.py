"""How agents are asked: an `Actor` answers a `Request` with a `Reply`; a `Deadline` goes down with it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from envs.protocol import Action, Observation

_RESOLUTION_S = 1e-6
"""Timers of event loops may fire a little early."""


@dataclass(frozen=True)
class Deadline:
    """A point in time, on the clock of the event loop."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """So many seconds from now. Needs a running event loop."""
        return cls(asyncio.get_running_loop().time() + seconds)

    def sooner(self, seconds: float) -> "Deadline":
        """This one, or the one so many seconds from now if that comes first."""
        return Deadline(min(self.at, self.after(seconds).at))

    @property
    def remaining(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.at - asyncio.get_running_loop().time())

    @property
    def passed(self) -> bool:
        """Whether the time is over."""
        return self.remaining < _RESOLUTION_S


@dataclass(frozen=True)
class Request:
    """One attempt at one turn."""

    generation: int
    episode: str
    round: int
    agent: str
    attempt: int
    """From 1. Draws must not depend on it if retries are to give the same tokens."""
    policy: str
    version: str
    """What must be sampled from."""
    observation: Observation
    """All that is new to the agent since its last turn; the same in every attempt."""
    deadline: Deadline


@dataclass(frozen=True)
class Reply:
    """What the agent said, and the version that it was really sampled from."""

    action: Action
    version: str


class ContextFull(Exception):  # noqa: N818 - the end of an episode, and nobody's error
    """What an agent is to be shown does not fit its model's context any more."""


class Actor(Protocol):
    """Plays an agent. What it raises ends the attempt; after the deadline its answer is ignored.

    Two things are no failed attempts: `ContextFull` truncates the episode, or makes the agent leave, as
    the protocol says; a `UsageError` ends all.
    """

    async def act(self, request: Request) -> Reply:
        """Answer a request."""
        ...


@dataclass(frozen=True)
class Scripted:
    """An actor that answers by a function, at once."""

    answer: Callable[[Request], str]

    async def act(self, request: Request) -> Reply:
        """What the function says, as said by the version that was asked for."""
        return Reply(Action(self.answer(request)), request.version)
