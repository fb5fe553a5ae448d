"""`Dialogue`: what one agent was shown and said in one episode, as token ids, and nothing rendered twice.

New messages are rendered and appended to the recorded ids. With `history: template` each prompt is
what the model's chat template makes of the whole conversation: where that is not what was recorded
with something appended (templates that drop earlier reasoning do that), a new row begins with it, and
the reason is counted. Each row becomes a trajectory, and what was sampled is trained once.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from envs.protocol import Message, Observation
from opentinker_core.agents.tools.formats import ToolDeclaration
from opentinker_core.models.renderer import Renderer
from opentinker_core.sampling.protocol import SampledSequence
from opentinker_core.trajectories.fsm import TrajectoryBuilder
from opentinker_core.trajectories.types import EndReason, Trajectory

History = Literal["append", "template"]
REWRITTEN = "template_rewrote_history"


@dataclass(frozen=True, eq=False)
class Spoken:
    """A turn as it was sampled."""

    sequence: SampledSequence
    text: str
    key: tuple[int, int]
    """Round and attempt of the request it answers."""
    masked: bool = False
    """It is not trained."""


@dataclass(frozen=True)
class Mark:
    """A place in a dialogue to go back to."""

    rows: int
    pieces: int
    messages: int


@dataclass(frozen=True)
class Identity:
    """What the trajectories of an agent's episode are called."""

    trajectory_id: str
    agent: str
    environment: str
    seed: int
    group: int
    member: int


@dataclass
class _Row:
    """Ids of one sequence: what was shown (lists) and said (`Spoken`), in turns."""

    pieces: list[list[int] | Spoken] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        found: list[int] = []
        for piece in self.pieces:
            found.extend(piece.sequence.tokens.tolist() if isinstance(piece, Spoken) else piece)
        return found


class Dialogue:
    """See the module. First `observe`, then `spoke`, and so on."""

    def __init__(
        self,
        renderer: Renderer,
        history: History = "append",
        declarations: Sequence[ToolDeclaration] = (),
    ) -> None:
        """`declarations`: tools that the first prompt tells the model of."""
        self._renderer = renderer
        self._whole = history == "template"
        self._declarations = tuple(declarations)
        self._rows = [_Row()]
        self._messages: list[Message] = []
        self._ids: list[int] = []
        self.forks: Counter[str] = Counter()
        """Rows begun, by reason."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """The ids of the row that is being written: after `observe`, the next request's prompt."""
        return tuple(self._ids)

    @property
    def turns(self) -> list[Spoken]:
        """All that was said, in order."""
        return [piece for row in self._rows for piece in row.pieces if isinstance(piece, Spoken)]

    def rendered(self, observation: Observation) -> tuple[list[int], bool]:
        """The ids that `observation` would add, and whether they begin a row of their own."""
        if not self._ids:
            return self._renderer.initial(observation, self._declarations), False
        if self._whole:
            messages = [*self._messages, *observation.messages]
            whole = self._renderer.whole(messages, self._declarations)
            known = len(self._ids)
            return (whole[known:], False) if whole[:known] == self._ids else (whole, True)
        return self._renderer.following(observation, self._last.sequence.tokens.tolist()), False

    def observe(self, observation: Observation, rendered: tuple[list[int], bool]) -> None:
        """Append what the agent is shown, as `rendered` gave it."""
        ids, begins = rendered
        if begins:
            self._rows.append(_Row())
            self._ids = []
            self.forks[REWRITTEN] += 1
        self._rows[-1].pieces.append(ids)
        self._ids.extend(ids)
        self._messages.extend(observation.messages)

    def spoke(self, sequence: SampledSequence, text: str, key: tuple[int, int]) -> None:
        """Append a turn as it was sampled; `text`: decoded, for templates; `key`: whose answer it is."""
        self._rows[-1].pieces.append(Spoken(sequence, text, key))
        self._ids.extend(sequence.tokens.tolist())
        self._messages.append(Message("assistant", text))

    def mask(self, turn: int) -> None:
        """Leave a turn (by its place in `turns`) out of training."""
        wanted = self.turns[turn]
        for row in self._rows:
            row.pieces = [replace(wanted, masked=True) if one is wanted else one for one in row.pieces]

    def mark(self) -> Mark:
        """Here and now."""
        return Mark(len(self._rows), len(self._rows[-1].pieces), len(self._messages))

    def rewind(self, mark: Mark) -> None:
        """Forget what came after `mark`."""
        self.forks[REWRITTEN] -= len(self._rows) - mark.rows
        del self._rows[mark.rows :], self._rows[-1].pieces[mark.pieces :], self._messages[mark.messages :]
        self._ids = self._rows[-1].ids

    def trajectories(
        self, identity: Identity, rewards: dict[int, float], end: EndReason, info: dict[str, Any]
    ) -> list[Trajectory]:
        """One trajectory a row.

        `rewards`: by place in `turns`; turns without one get 0 if the episode has rewards at all.
        What was shown after the last turn is left out: nothing answers it.
        """
        masked = [place for place, turn in enumerate(self.turns) if turn.masked]
        if +self.forks:
            info = info | {"forks": dict(self.forks)}
        place, made = 0, []
        for number, row in enumerate(self._rows):
            name = identity.trajectory_id + (f"-r{number}" if number else "")
            builder = TrajectoryBuilder(**(vars(identity) | {"trajectory_id": name}))
            said = sum(isinstance(piece, Spoken) for piece in row.pieces)
            for piece in _trimmed(row.pieces):
                if isinstance(piece, Spoken):
                    sequence = piece.sequence
                    builder.generated(
                        sequence.tokens, sequence.logprobs, sequence.version, sequence.stop_reason
                    )
                    if end is not EndReason.FAILED or place in rewards:
                        builder.rewarded(rewards.get(place, 0.0))
                    place += 1
                else:
                    builder.observed(piece)
            own = [one - (place - said) for one in masked if place - said <= one < place]
            made.append(builder.terminate(end, info | {"masked_turns": own} if own else info))
        return made

    @property
    def _last(self) -> Spoken:
        last = self._rows[-1].pieces[-1]
        assert isinstance(last, Spoken)
        return last


def _trimmed(pieces: Sequence[list[int] | Spoken]) -> Sequence[list[int] | Spoken]:
    """Without what was shown at the end, unless nothing was ever said."""
    spoken = [index for index, piece in enumerate(pieces) if isinstance(piece, Spoken)]
    return pieces[: spoken[-1] + 1] if spoken else pieces


def no_logprobs(tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that no model sampled, with logprobs of 0 (shape (T,) each)."""
    return np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)
