"""Episodes of a single agent: a table with one seat, and the environment's own words for errors.

Tokens go in and out as ids; what was sampled is recorded as it is and never rendered again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from envs.protocol import Environment
from opentinker_core.agents.alone import AGENT as AGENT
from opentinker_core.agents.alone import Alone
from opentinker_core.agents.coordination.log import EpisodeEnd
from opentinker_core.agents.coordination.protocol import CoordinationProtocol, TurnOrder
from opentinker_core.agents.playing import EpisodeSpec as EpisodeSpec
from opentinker_core.agents.playing import Play, Played, Table, demonstrate_all, play_all
from opentinker_core.agents.seats import Seat
from opentinker_core.config.episodes import EpisodesConfig
from opentinker_core.errors import OpenTinkerError
from opentinker_core.models.renderer import Renderer
from opentinker_core.sampling.protocol import Sampler, SamplingParams
from opentinker_core.trajectories.types import Trajectory

if TYPE_CHECKING:
    from opentinker_core.agents.tools.making import OpenTools

_POLICY = "policy"


@dataclass(frozen=True)
class EpisodeSettings:
    """What all episodes of a set share."""

    environment: str
    make_environment: Callable[[], Environment]
    renderer: Renderer
    params: SamplingParams
    stop: tuple[str, ...]
    max_turns: int
    max_context: int
    step: int
    limits: EpisodesConfig = field(default_factory=EpisodesConfig)
    open_tools: "Callable[[], OpenTools] | None" = None

    @property
    def seat(self) -> Seat:
        """How the agent plays."""
        return Seat(
            self.environment,
            self.renderer,
            self.params,
            self.stop,
            self.max_context,
            history=self.limits.history,
            max_observation_chars=self.limits.max_observation_chars,
            open_tools=self.open_tools,
        )

    def table(self) -> Table:
        """The agent alone at a table."""
        limits = self.limits
        protocol = CoordinationProtocol(
            policies={AGENT: _POLICY},
            order=TurnOrder.SEQUENTIAL,
            turn_s=limits.turn_s,
            episode_s=limits.episode_s,
            attempts=limits.attempts,
            max_rounds=self.max_turns,
        )

        def make() -> Alone:
            return Alone(self.make_environment(), self.environment)

        return Table(self.environment, make, protocol, {AGENT: self.seat}, self.step, limits.step_s)


def play(
    specs: Sequence[EpisodeSpec], settings: EpisodeSettings, sampler: Sampler, version: str
) -> list[Trajectory]:
    """Play `specs` with `version` to their end; one trajectory each, in order (more, where records fork).

    An episode whose environment or sampler fails, or takes too long, is recorded as failed: its
    reward is missing, not zero.

    Raises:
        UsageError: an environment's first prompt does not fit the model's context.
        OpenTinkerError: every episode failed, so that something is wrong with the environment.
    """
    plays = [Play(spec, {_POLICY: version}) for spec in specs]
    played = play_all(plays, settings.table(), sampler)
    refuse_failure_of_all(played, settings.environment, settings.step)
    return [trajectory for one in played for trajectory in one.trajectories[AGENT]]


def demonstrate(specs: Sequence[EpisodeSpec], settings: EpisodeSettings) -> list[Trajectory]:
    """Let the environment itself answer: trajectories for supervised training (one turn each step).

    Raises:
        UsageError: it has no demonstrations, or one does not fit the model's context.
        OpenTinkerError: every episode failed.
    """
    plays = [Play(spec, {_POLICY: "demonstration"}) for spec in specs]
    played = demonstrate_all(plays, settings.table())
    refuse_failure_of_all(played, settings.environment, settings.step)
    return [trajectory for one in played for trajectory in one.trajectories[AGENT]]


def refuse_failure_of_all(played: Sequence[Played], environment: str, step: int) -> None:
    """Raise if no episode has rewards.

    Raises:
        OpenTinkerError: the message has what the first said.
    """
    if played and not any(one.result.end.counts for one in played):
        first = played[0].result
        limits = {EpisodeEnd.DEADLINE: " (episode_s)", EpisodeEnd.AGENT_DIED: " (turn_s)"}
        late = first.error in ("", "late")
        raise OpenTinkerError(
            f"environment {environment!r}: all {len(played)} episodes of step {step} failed; "
            f"the first said: {first.error or first.end}{limits.get(first.end, '') if late else ''}"
        )
