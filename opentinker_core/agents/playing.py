"""Plays many episodes at once, each by its coordinator: `Play` in, `Played` out.

All that wait for tokens are sampled together (`broker`), environments are called in threads with a
limit (`stepping`), and an episode that fails or hangs costs no other: its rewards are missing.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from envs.multi import Actions, MultiEnvironment, Situation
from opentinker_core.agents.broker import Broker
from opentinker_core.agents.coordination.coordinator import (
    AgentResult,
    Coordinator,
    EpisodePlan,
    EpisodeResult,
)
from opentinker_core.agents.coordination.log import EpisodeEnd, EventLog
from opentinker_core.agents.coordination.protocol import CoordinationProtocol
from opentinker_core.agents.dialogue import Identity
from opentinker_core.agents.guarded import described
from opentinker_core.agents.seats import Actor, DemonstratingActor, PolicyActor, Seat
from opentinker_core.agents.stepping import Stepper
from opentinker_core.errors import UsageError
from opentinker_core.sampling.protocol import Sampler
from opentinker_core.seeds import derive_seed
from opentinker_core.trajectories.types import UNTURNED, EndReason, Trajectory

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

_ENDS = {
    EpisodeEnd.DONE: EndReason.DONE,
    EpisodeEnd.MAX_ROUNDS: EndReason.MAX_TURNS,
    EpisodeEnd.CONTEXT: EndReason.CONTEXT,
}


@dataclass(frozen=True)
class EpisodeSpec:
    """Which episode to play: the environment's seed, its place in the set, and the seed of its draws."""

    environment_seed: int
    group: int
    member: int
    draw_seed: int


@dataclass(frozen=True)
class Table:
    """What all episodes of a set share."""

    environment: str
    make_environment: Callable[[], MultiEnvironment]
    protocol: CoordinationProtocol
    seats: Mapping[str, Seat]
    """By agent."""
    step: int
    step_s: float = 60.0
    """Seconds for one call of an environment."""


@dataclass(frozen=True)
class Play:
    """An episode, and the version that each policy plays it with."""

    spec: EpisodeSpec
    versions: Mapping[str, str]

    def name(self, step: int) -> str:
        """Of the episode, unique in its set."""
        return f"s{step:05d}-g{self.spec.group}-m{self.spec.member}"


@dataclass(frozen=True)
class Played:
    """What became of an episode, with the trajectories of each agent: several where its record forked."""

    spec: EpisodeSpec
    result: EpisodeResult
    trajectories: Mapping[str, tuple[Trajectory, ...]]


def play_all(
    plays: Sequence[Play], table: Table, sampler: Sampler, log: EventLog | None = None
) -> list[Played]:
    """Sample episodes to their ends, in the order of `plays`; `log`: gets all that happened.

    Raises:
        UsageError: a first prompt does not fit the model's context, or the agents of the environment
            are not those of the protocol.
    """

    def seated(play: Play, agent: str, _: MultiEnvironment, broker: Broker, __: Stepper) -> Actor:
        seed = play.spec.draw_seed
        alone = len(table.seats) == 1
        return PolicyActor(table.seats[agent], broker, seed if alone else derive_seed(seed, agent))

    return _run(_play_all(plays, table, Broker(sampler), log or EventLog(), seated))


def demonstrate_all(plays: Sequence[Play], table: Table) -> list[Played]:
    """Let the environments themselves answer: trajectories for supervised training.

    Raises:
        UsageError: an environment has no demonstrations, or one does not fit the model's context.
    """

    def seated(_: Play, agent: str, environment: MultiEnvironment, __: None, stepper: Stepper) -> Actor:
        return DemonstratingActor(table.seats[agent], environment, stepper.call)

    return _run(_play_all(plays, table, None, EventLog(), seated))


Seated = Callable[[Play, str, MultiEnvironment, Any, Stepper], Actor]


async def _play_all(
    plays: Sequence[Play], table: Table, broker: Broker | None, log: EventLog, seated: Seated
) -> list[Played]:
    stepper = Stepper(table.step_s)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_play(play, table, broker, log, seated, stepper)) for play in plays]
    except BaseExceptionGroup as several:
        raise _first(several) from several
    finally:
        stepper.close()
    return [task.result() for task in tasks]


async def _play(
    play: Play, table: Table, broker: Broker | None, log: EventLog, seated: Seated, stepper: Stepper
) -> Played:
    making, actors = _Making(table.make_environment), dict[str, Actor]()
    name = play.name(table.step)
    try:
        with broker.playing(name) if broker is not None else nullcontext():
            environment = await _made(making, table, stepper)
            for agent in table.seats:
                actors[agent] = seated(play, agent, environment, broker, stepper)
            coordinator = Coordinator(table.protocol, actors, log, stepper.call)
            plan = EpisodePlan(name, play.spec.environment_seed, play.versions, table.step)
            result = await coordinator.play(plan, environment)
        return _played(play, table, result, actors)
    finally:
        await _surely(_close(making.over(), actors, stepper))


class _Making:
    """Makes an environment in a thread: if nobody waits for it any more when it comes, it is closed there."""

    def __init__(self, make: Callable[[], MultiEnvironment]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: MultiEnvironment | None = None
        self._is_over = False

    def make(self, _: None) -> MultiEnvironment:
        """Make it."""
        made = self._make()
        with self._lock:
            late = self._is_over
            self._made = made
        if late:
            _closing(made)
        return made

    def over(self) -> MultiEnvironment | None:
        """From now on nobody waits for it; what was made before."""
        with self._lock:
            self._is_over = True
            return self._made


class _Unmade:
    """Stands for an environment that could not be made: its episode fails as if `reset` had raised."""

    def __init__(self, agents: tuple[str, ...], error: BaseException) -> None:
        self.agents = agents
        self._error = error

    def reset(self, seed: int) -> Situation:
        """Raise."""
        raise self._error

    def step(self, actions: Actions) -> Situation:
        """Raise."""
        raise self._error


async def _made(making: _Making, table: Table, stepper: Stepper) -> MultiEnvironment:
    try:
        return await stepper.call(making.make, None)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code: it costs this episode
        return _Unmade(table.protocol.agents, error)


async def _close(environment: MultiEnvironment | None, actors: Mapping[str, Actor], stepper: Stepper) -> None:
    """Exactly once; what fails then does not change the episode that was played."""
    for one in [*(actor for actor in actors.values() if actor.tools), environment]:
        try:
            await stepper.call(_closing, one, of=one)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code
            _LOG.warning("%s could not be closed: %s", type(one).__name__, described(error))


async def _surely(work: Coroutine[Any, Any, None]) -> None:
    """Do it to its end, and only then be cancelled."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled:
        raise cancelled
    task.result()


def _closing(one: object) -> None:
    if callable(close := getattr(one, "close", None)):
        close()


def _played(play: Play, table: Table, result: EpisodeResult, actors: Mapping[str, Actor]) -> Played:
    alone = len(actors) == 1
    found = {}
    for agent, actor in actors.items():
        spec = play.spec
        identity = Identity(
            result.plan.episode + ("" if alone else f"-{agent}"),
            agent,
            table.environment,
            spec.environment_seed,
            spec.group,
            spec.member,
        )
        found[agent] = tuple(_trajectories(identity, result, result.agents[agent], actor))
    return Played(play.spec, result, found)


def _trajectories(
    identity: Identity, result: EpisodeResult, part: AgentResult, actor: Actor
) -> list[Trajectory]:
    """The rewards of an agent's turns go to the last of the sampled turns that made each."""
    dialogue = actor.dialogue
    taken = {(turn.round, turn.attempt): turn.reward for turn in part.turns}
    last = {turn.key: place for place, turn in enumerate(dialogue.turns)}
    rewards = {place: taken[key] for key, place in last.items() if key in taken}
    for place, turn in enumerate(dialogue.turns):
        if turn.key not in taken and result.end.counts:  # it was said, and never played
            dialogue.mask(place)
    end = _ENDS.get(result.end, EndReason.FAILED) if part.reward is not None else EndReason.FAILED
    info: dict[str, Any] = {
        "prompt": actor.prompt_text,
        "actions": [turn.text for turn in dialogue.turns],
        "environment": dict(result.info),
    }
    if not dialogue.turns and part.reward is not None:
        info[UNTURNED] = part.reward
    if end is EndReason.FAILED:
        info["failed"] = "agent_died" if part.died else str(result.end)
        info["error"] = part.died or result.error or f"the episode ended by {result.end}"
    return dialogue.trajectories(identity, rewards, end, info)


def _first(several: BaseExceptionGroup[Any]) -> BaseException:
    """Of what several tasks raised, the first that is no group."""
    error: BaseException = several
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end, in a thread of its own where an event loop runs in this one (notebooks)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 - it is raised again below
            failed.append(error)

    thread = threading.Thread(target=run, name="episodes")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
