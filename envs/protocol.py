"""What an environment is: `reset(seed)` gives an observation, `step(action)` the next one and a reward.

Nouns: `Message` (role and text), `Observation` (what the agent is shown), `Action` (what the
agent said), `StepResult` (what came of it), `Environment` (one episode at a time). What else an
environment may offer has protocols of its own: `Demonstrates`, `DemonstratesTools`, `Closes`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Message:
    """One utterance shown to the agent."""

    role: Role
    content: str


@dataclass(frozen=True)
class Observation:
    """New messages for the agent; with plain rendering their contents are simply joined."""

    messages: tuple[Message, ...]

    @classmethod
    def user(cls, text: str) -> "Observation":
        """An observation of one user message."""
        return cls((Message("user", text),))

    @property
    def text(self) -> str:
        """All contents joined, without role markers."""
        return "".join(message.content for message in self.messages)


@dataclass(frozen=True)
class Action:
    """What the agent said: decoded text without stop token or stop string."""

    text: str


@dataclass(frozen=True)
class StepResult:
    """The outcome of an action.

    `done` ends the episode (then `observation` may be empty). `info` holds JSON values for the
    record; metrics among them are numbers.
    """

    observation: Observation
    reward: float
    done: bool
    info: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One problem source; an instance plays one episode at a time.

    The same seed and actions give the same observations and rewards, whatever was played before
    and in whichever process. Problems of the two splits never overlap.

    Episodes end by themselves. A class whose episodes may go on for ever (a game without a limit
    of moves) says so by the class attribute `unlimited = True`; `max_turns` then ends them.

    Calls of all environments of a process are made one at a time. A class whose calls wait for
    another process or machine says so by `concurrent = True`; then many are made at once, in threads.
    """

    def reset(self, seed: int) -> Observation:
        """Start the episode that belongs to `seed` (0 <= seed < 2**63)."""
        ...

    def step(self, action: Action) -> StepResult:
        """Take the agent's action.

        Raises:
            RuntimeError: no episode is running (before `reset`, or after `done`).
        """
        ...


@runtime_checkable
class Demonstrates(Protocol):
    """An environment that can show a right answer, for supervised warm-up."""

    def demonstration(self) -> Action:
        """A right action for the current state of the running episode."""
        ...


@dataclass(frozen=True)
class Call:
    """A tool to be called, by name, with arguments as its schema has them (JSON values)."""

    name: str
    arguments: Mapping[str, Any]


@runtime_checkable
class DemonstratesTools(Protocol):
    """An environment that can show how a problem is solved with tools.

    The tools are the agent's: the environment names them and never runs them.
    """

    def demonstration_after(self, results: tuple[str, ...]) -> Action | tuple[Call, ...]:
        """What to do in the running turn: calls to be made at once (in parallel), or the right action.

        `results` are the texts that all calls of this turn so far gave, in the order of the calls;
        empty at the turn's beginning. A tuple of calls has one at least.

        Raises:
            RuntimeError: no episode is running.
        """
        ...


@runtime_checkable
class Closes(Protocol):
    """An environment that holds something to be given back: a process, a connection, a file.

    Who made the environment closes it, once, when no further episode is to be played on it. It may
    be closed before any `reset` and in the middle of an episode; closing it again does nothing.
    """

    def close(self) -> None:
        """Give everything back; `reset` and `step` are not called any more."""
        ...
