"""Many episodes at once: what one environment does wrong costs no other, and each is closed exactly once."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from envs.protocol import Action, Observation, StepResult
from opentinker_core.agents import playing
from opentinker_core.agents.alone import AGENT, Alone
from opentinker_core.agents.coordination.log import EpisodeEnd
from opentinker_core.agents.coordination.protocol import CoordinationProtocol, TurnOrder
from opentinker_core.agents.playing import Played, Table, _play_all, demonstrate_all, play_all
from opentinker_core.agents.stepping import Stepper
from opentinker_core.config.tools import ToolsConfig
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.trajectories.types import EndReason
from tests.agents import speaking
from tests.agents.speaking import Speaker
from tests.waiting import PATIENCE_S, wait_until

T = TypeVar("T")
EPISODES = 64
SOON_S = 0.5
VERSIONS = {"policy": "policy@1"}
ALONE = CoordinationProtocol(
    policies={AGENT: "policy"}, order=TurnOrder.SEQUENTIAL, turn_s=PATIENCE_S, episode_s=PATIENCE_S
)


class Troubled:
    """Three turns; does at `place` what `trouble` does. Notes when it is closed."""

    concurrent = False

    def __init__(self, house: "House") -> None:
        self.house = house
        self.turn = 0
        self.closed = 0
        house.happens("make", -1)
        house.made.append(self)

    def reset(self, seed: int) -> Observation:
        self.seed = seed
        self.house.happens("reset", seed)
        return Observation.user("go")

    def step(self, action: Action) -> StepResult:
        self.turn += 1
        if self.turn == 2:
            self.house.happens("step", self.seed)
        return StepResult(Observation.user("on"), 1.0, self.turn == 3)

    def demonstration(self) -> Action:
        return Action("hi")

    def close(self) -> None:
        self.closed += 1
        self.house.happens("close", getattr(self, "seed", -1))


class Elsewhere(Troubled):
    """As one that waits for another machine."""

    concurrent = True


class House:
    """Makes environments, and does what `trouble` does at `place` in the episode of seed `seed`."""

    def __init__(self, place: str = "", trouble: Callable[[], Any] = lambda: None, seed: int = 7) -> None:
        self.place, self.trouble, self.seed = place, trouble, seed
        self.made: list[Troubled] = []
        self.kind: type[Troubled] = Troubled
        self._making = iter(range(10**6))
        Hasty.house = self

    def make(self) -> Alone:
        return Alone(self.kind(self), "troubled")

    def happens(self, place: str, seed: int) -> None:
        number = next(self._making) if place == "make" else seed
        if place == self.place and number == self.seed:
            self.trouble()

    def table(self, tools: ToolsConfig | None = None) -> Table:
        return speaking.table(self.make, ALONE, PATIENCE_S, tools)


class Hasty(Stepper):
    """Has little patience with what is done at the place of trouble, and all with everything else."""

    house: House

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self._hasty = Stepper(SOON_S)

    async def call(self, method: Callable[[Any], T], argument: Any, of: object = None) -> T:
        subject = getattr(method, "__self__", None) if of is None else of
        seed = getattr(subject.environment, "seed", argument) if isinstance(subject, Alone) else -1
        place = {"_closing": "close"}.get(method.__name__, method.__name__)
        troubled = place == self.house.place and (place == "make" or seed == self.house.seed)
        call = self._hasty.call if troubled else super().call
        return await call(method, argument, of)

    def close(self) -> None:
        super().close()
        self._hasty.close()


class Wedge:
    """Hangs until it is released."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.released.wait(PATIENCE_S)


@pytest.fixture
def wedge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wedge]:
    monkeypatch.setattr(playing, "Stepper", Hasty)
    wedge = Wedge()
    yield wedge
    wedge.released.set()
    wait_until(lambda: not threads(), "the end of the wedged thread")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name in ("environment", "sampling")]


def fail() -> None:
    raise ConnectionError("the world ended")


def leave() -> None:
    raise SystemExit(3)


def play(house: House) -> list[Played]:
    plays = speaking.plays(EPISODES, VERSIONS)
    return play_all(plays, house.table(), Speaker(lambda prompt: f"{len(prompt)}"))


def ends(played: list[Played]) -> dict[EpisodeEnd, int]:
    found = [one.result.end for one in played]
    return {end: found.count(end) for end in found}


def check_others(played: list[Played], house: House, seed: int = 7) -> None:
    """The one is missing, all others are done, and everything was closed once."""
    assert ends(played) == {EpisodeEnd.DONE: len(played) - 1, EpisodeEnd.ENVIRONMENT_FAILED: 1}
    for one in played:
        (trajectory,) = one.trajectories[AGENT]
        lost = one.spec.environment_seed == seed
        assert trajectory.reward == (None if lost else 3.0)
        assert (trajectory.end_reason is EndReason.FAILED) == lost
    assert {environment.closed for environment in house.made} == {1}


def test_all_is_closed_once_and_no_thread_stays() -> None:
    house = House()
    played = play(house)
    assert ends(played) == {EpisodeEnd.DONE: EPISODES}
    assert [environment.closed for environment in house.made] == [1] * EPISODES
    wait_until(lambda: not threads(), "the end of the threads")


@pytest.mark.parametrize("place", ["reset", "step"])
@pytest.mark.parametrize("trouble", [fail, leave])
def test_an_environment_that_raises_costs_its_own_episode(place: str, trouble: Callable[[], Any]) -> None:
    house = House(place, trouble)
    check_others(play(house), house)
    assert len(house.made) == EPISODES


@pytest.mark.parametrize("place", ["reset", "step"])
@pytest.mark.parametrize("kind", [Troubled, Elsewhere])
def test_one_that_hangs_costs_its_own_episode(place: str, kind: type[Troubled], wedge: Wedge) -> None:
    house = House(place, wedge)
    house.kind = kind
    played = play(house)
    check_others(played, house)
    (lost,) = (one for one in played if one.spec.environment_seed == 7)
    assert lost.result.error.startswith(f"TimeoutError: {place} took longer than 0.5 s")
    wait_until(lambda: len(threads()) == 1, "the end of all threads but the one that hangs")


@pytest.mark.parametrize("trouble", [fail, leave])
def test_one_that_cannot_be_made_costs_its_own_episode(trouble: Callable[[], Any]) -> None:
    house = House("make", trouble)
    played = play(house)
    lost = [one.spec.environment_seed for one in played if not one.result.end.counts]
    assert len(lost) == 1
    check_others(played, house, lost[0])
    assert len(house.made) == EPISODES - 1


def test_one_that_is_made_too_late_is_closed_when_it_comes(wedge: Wedge) -> None:
    house = House("make", wedge)
    assert ends(play(house))[EpisodeEnd.ENVIRONMENT_FAILED] >= 1
    assert len(house.made) < EPISODES
    wedge.released.set()
    wait_until(lambda: [one.closed for one in house.made] == [1] * EPISODES, "the late one and its end")


@pytest.mark.parametrize("trouble", [fail, leave])
def test_what_goes_wrong_when_it_is_closed_changes_no_episode(trouble: Callable[[], Any]) -> None:
    house = House("close", trouble)
    assert ends(play(house)) == {EpisodeEnd.DONE: EPISODES}
    assert {environment.closed for environment in house.made} == {1}


def test_one_that_hangs_when_it_is_closed_changes_no_episode(wedge: Wedge) -> None:
    house = House("close", wedge)
    assert ends(play(house)) == {EpisodeEnd.DONE: EPISODES}
    assert {environment.closed for environment in house.made} == {1}


def test_bad_usage_of_one_ends_all_and_all_are_closed_once() -> None:
    def refuse() -> None:
        raise UsageError("not so")

    house = House("step", refuse)
    with pytest.raises(UsageError, match="not so"):
        play(house)
    assert {environment.closed for environment in house.made} == {1}
    wait_until(lambda: not threads(), "the end of the threads")


def test_a_run_that_is_cancelled_closes_all_once(wedge: Wedge) -> None:
    house = House("step", wedge)

    async def main() -> None:
        from opentinker_core.agents.broker import Broker
        from opentinker_core.agents.coordination.log import EventLog
        from opentinker_core.agents.seats import PolicyActor

        table, log = house.table(), EventLog()
        broker = Broker(Speaker(lambda prompt: "hi"))
        task = asyncio.create_task(
            _play_all(
                speaking.plays(EPISODES, VERSIONS),
                table,
                broker,
                log,
                lambda play, agent, _, broker, __: PolicyActor(table.seats[agent], broker, 0),
            )
        )
        await asyncio.to_thread(wedge.entered.wait, PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert {environment.closed for environment in house.made} == {1}


def test_tools_that_cannot_be_opened_leave_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def unopened(*_: Any) -> Any:
        raise OpenTinkerError("no sandbox here")

    monkeypatch.setattr(speaking, "open_tools", unopened)
    house = House()
    table = house.table(ToolsConfig(names=("calculator",)))
    with pytest.raises(OpenTinkerError, match="no sandbox here"):
        play_all(speaking.plays(EPISODES, VERSIONS), table, Speaker(lambda prompt: "hi"))
    wait_until(lambda: {environment.closed for environment in house.made} == {1}, "the end of all")


def test_demonstrations_are_played_and_closed_alike(wedge: Wedge) -> None:
    house = House("step", wedge)
    check_others(demonstrate_all(speaking.plays(EPISODES, VERSIONS), house.table()), house)


def test_a_sampler_that_fails_costs_the_episodes_that_asked_it() -> None:
    def say(prompt: str) -> str:
        raise ConnectionError("the sampler is gone")

    house = House()
    played = play_all(speaking.plays(4, VERSIONS), house.table(), Speaker(say))
    assert ends(played) == {EpisodeEnd.AGENT_DIED: 4}
    assert played[0].result.error == "raised ConnectionError: the sampler is gone"
    assert {environment.closed for environment in house.made} == {1}


def test_all_episodes_are_sampled_together() -> None:
    house, speaker = House(), Speaker(lambda prompt: f"{len(prompt)}")
    play_all(speaking.plays(EPISODES, VERSIONS), house.table(), speaker)
    assert len(speaker.calls) < EPISODES  # of 192 turns
