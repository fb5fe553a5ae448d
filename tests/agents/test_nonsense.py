"""Environments of several agents that give nonsense, which costs their own episodes and no others."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from envs.multi import Actions, Situation, check_actions
from envs.protocol import Action, Message, Observation
from opentinker_core.agents.coordination.checker import check
from opentinker_core.agents.coordination.log import EventLog
from opentinker_core.agents.coordination.protocol import CoordinationProtocol, TurnOrder
from opentinker_core.agents.playing import Played, demonstrate_all, play_all
from opentinker_core.errors import UsageError
from opentinker_core.trajectories.store import TrajectoryStore
from tests.agents.speaking import Speaker, plays, table
from tests.waiting import PATIENCE_S

BAD = 1
"""The seed of the episode with the nonsense."""
VERSIONS = {"black": "black@1", "white": "white@1"}
PROTOCOL = CoordinationProtocol(
    policies={"X": "black", "O": "white"},
    order=TurnOrder.SEQUENTIAL,
    turn_s=PATIENCE_S,
    episode_s=PATIENCE_S,
)
END = {"rewards": {"X": 1.0, "O": 0.0}}
HI = {"X": Observation.user("hi")}

Nonsense = Callable[[], Any]


class Rude:
    """X and O speak once; in the episode of seed `BAD`, `place` gives what `nonsense` does."""

    agents: Any = ("X", "O")
    place = ""
    nonsense: Nonsense = staticmethod(lambda: None)

    def reset(self, seed: int) -> Situation:
        self.seed, self.situation = seed, Situation(("X",), observations=HI)
        return self.given("reset")

    def step(self, actions: Actions) -> Situation:
        check_actions(self.situation, actions)
        shown = {"O": Observation.user("you")}
        last = "O" in self.situation.to_act
        self.situation = Situation((), **END) if last else Situation(("O",), observations=shown)
        return self.given("end" if last else "step")

    def demonstration(self, agent: str) -> Action:
        bad = self.seed == BAD and self.place == "demonstration"
        return self.nonsense() if bad else Action("hi")

    def given(self, place: str) -> Situation:
        return self.nonsense() if self.seed == BAD and self.place == place else self.situation


def rude(place: str, nonsense: Nonsense) -> type[Rude]:
    return type("Rude", (Rude,), {"place": place, "nonsense": staticmethod(nonsense)})


def played(environment: type[Rude], log: EventLog | None = None) -> list[Played]:
    seats = table(environment, PROTOCOL, PATIENCE_S)
    return play_all(plays(3, VERSIONS), seats, Speaker(lambda _: "a1"), log)


def lost(found: list[Played]) -> str:
    """What the episode of the nonsense failed with; the others are done."""
    assert [one.result.end.counts for one in found] == [True, False, True]
    return found[BAD].result.error


def raising(error: BaseException) -> Nonsense:
    def nonsense() -> Any:
        raise error

    return nonsense


NONSENSE: dict[str, Nonsense] = {
    "nothing": lambda: None,
    "a tuple": lambda: ("hi", 1.0, True, {}),
    "text for an observation": lambda: Situation(("X",), observations={"X": "hi"}),  # type: ignore[dict-item]
    "a lone surrogate": lambda: Situation(("X",), observations={"X": Observation.user("\ud800")}),
    "bytes": lambda: Situation(("X",), observations={"X": Observation((Message("user", b"hi"),))}),  # type: ignore[arg-type]
    "numbers for agents": lambda: Situation((1,)),  # type: ignore[arg-type]
    "a list of a list": lambda: Situation(([],)),  # type: ignore[arg-type]
    "text for agents": lambda: Situation("X", observations=HI),  # type: ignore[arg-type]
    "no rewards": lambda: Situation((), rewards=None),  # type: ignore[arg-type]
    "a list of rewards": lambda: Situation((), rewards=[1.0, 0.0]),  # type: ignore[arg-type]
    "rewards of numbers": lambda: Situation((), rewards={0: 1.0}),  # type: ignore[dict-item]
    "rewards of numbers and agents": lambda: Situation((), rewards={"X": 1.0, 0: 1.0}),  # type: ignore[dict-item]
    "a reward of nan": lambda: Situation((), rewards={"X": float("nan")}),
    "a reward beyond floats": lambda: Situation((), rewards={"X": 10**400}),
    "a reward of text": lambda: Situation((), rewards={"X": "1"}),  # type: ignore[dict-item]
    "no info": lambda: Situation((), info=None),  # type: ignore[arg-type]
    "info that is text": lambda: Situation((), info="won"),  # type: ignore[arg-type]
    "info that is no JSON": lambda: Situation((), info={"board": object()}),
    "info that is nan": lambda: Situation((), info={"value": float("nan")}),
    "KeyboardInterrupt": raising(KeyboardInterrupt("no")),
    "an error with a lone surrogate": raising(RuntimeError("\ud800")),
}


@pytest.mark.parametrize("place", ["reset", "step", "end"])
@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_costs_its_own_episode(place: str, name: str) -> None:
    log = EventLog()
    assert lost(played(rude(place, NONSENSE[name]), log)).encode()  # which is stored
    assert check(log, PROTOCOL) == []


@pytest.mark.parametrize(
    "nothing",
    [{}, {"X": Observation(())}, {"X": Observation.user("")}],
    ids=["no observation", "empty", "''"],
)
def test_an_agent_that_is_to_act_without_having_been_shown_anything_costs_its_own_episode(
    nothing: dict[str, Observation],
) -> None:
    found = played(rude("reset", lambda: Situation(("X",), observations=nothing)))
    assert "an agent that was shown nothing is to act" in lost(found)


@pytest.mark.parametrize("reward", [np.float32(0.5), np.int64(2), Fraction(1, 2), True, 3], ids=repr)
def test_rewards_are_any_numbers(reward: Any, tmp_path: Any) -> None:
    log = EventLog()
    found = played(rude("end", lambda: Situation((), rewards={"X": reward})), log)
    assert found[BAD].result.agents["X"].reward == float(reward)
    assert check(log, PROTOCOL) == []
    rows = [row for one in found for rows in one.trajectories.values() for row in rows]
    TrajectoryStore(f"file://{tmp_path}/sets", tmp_path / "cache").save(("set",), rows)


@pytest.mark.parametrize(
    "nonsense",
    [
        raising(RuntimeError("no")),
        raising(SystemExit(2)),
        raising(KeyboardInterrupt()),
        lambda: "hi",
        lambda: None,
        lambda: (),
    ],
    ids=["raises", "leaves", "interrupts", "text", "nothing", "no calls"],
)
def test_a_demonstration_that_fails_costs_its_own_episode(nonsense: Nonsense) -> None:
    demonstrated = demonstrate_all(
        plays(3, dict.fromkeys(VERSIONS, "demonstration")),
        table(rude("demonstration", nonsense), PROTOCOL, PATIENCE_S),
    )
    assert "demonstration" in lost(demonstrated) or "KeyboardInterrupt" in lost(demonstrated)


def raises(_: Any) -> Any:
    raise RuntimeError("who?")


@pytest.mark.parametrize(
    "agents", [None, (1, 2), property(raises), ("X", "Y")], ids=["none", "numbers", "raises", "others"]
)
def test_other_agents_than_the_protocols_are_refused(agents: Any) -> None:
    with pytest.raises(UsageError, match="environment: agents"):
        played(type("Strange", (Rude,), {"agents": agents}))
