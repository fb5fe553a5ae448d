"""A right environment of several agents, and one for each promise that it can break."""

import itertools
import os
import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from envs.multi import Actions, Situation, Spoken, check_actions, require_turn
from envs.protocol import Action, Observation, Split


class Right:
    """Three agents say the shown number, for two rounds; who says it first in its round earns a point."""

    together = True

    def __init__(self, split: Split = "train") -> None:
        self.split = split
        self.number = self.rounds = 0
        self.gone: list[str] = []
        self.situation = Situation(())

    @property
    def agents(self) -> tuple[str, ...]:
        return ("a", "b", "c")

    def draw(self, seed: int) -> int:
        number = random.Random(seed).randrange(10**6)
        return number - number % 4 + (3 if self.split == "held_out" else number % 3)

    def reset(self, seed: int) -> Situation:
        self.number, self.rounds, self.gone = self.draw(seed), 2, []
        self.situation = self.now({})
        return self.situation

    def now(self, rewards: dict[str, float]) -> Situation:
        to_act = self.playing() if self.rounds else ()
        shown = {agent: Observation.user(f"{self.number}?") for agent in to_act}
        return Situation(to_act, self.together, shown, rewards, self.info())

    def playing(self) -> tuple[str, ...]:
        return tuple(agent for agent in self.agents if agent not in self.gone)

    def info(self) -> dict[Any, Any]:
        return {"rounds": self.rounds}

    def check(self, actions: Actions) -> None:
        check_actions(self.situation, actions, self.gone)

    def step(self, actions: Actions) -> Situation:
        self.check(actions)
        self.gone += [agent for agent, action in actions.items() if action is None]
        self.rounds -= 1
        self.situation = self.now(self.reward(actions))
        return self.situation

    def reward(self, actions: Actions) -> dict[str, float]:
        return {agent: 1.0 for agent in self.agents if self.is_right(actions.get(agent))}

    def is_right(self, action: Action | None) -> bool:
        return action is not None and action.text == str(self.number)

    def recompute(self, seed: int, steps: Sequence[Spoken]) -> list[dict[str, float]]:
        number = str(self.draw(seed))
        return [{agent: 1.0 for agent, text in step.items() if text == number} for step in steps]

    def demonstration(self, agent: str) -> Action:
        require_turn(self.situation, agent)
        return Action(str(self.number))


class OneAfterTheOther(Right):
    together = False


class RaisesOnText(Right):
    def is_right(self, action: Action | None) -> bool:
        return action is not None and int(action.text) == self.number


class ReturnsATuple(Right):
    def step(self, actions: Actions) -> Any:
        situation = super().step(actions)
        return situation.observations, situation.rewards


class AgentsAreAList(Right):
    @property
    def agents(self) -> Any:
        return ["a", "b", "c"]


class AgentsChange(Right):
    @property
    def agents(self) -> tuple[str, ...]:
        return ("a", "b", "c") if self.rounds else ("a", "b")


class ToActIsAList(Right):
    def playing(self) -> Any:
        return list(super().playing())


class TogetherIsANumber(Right):
    together = 1  # type: ignore[assignment]


class RewardsAStranger(Right):
    def reward(self, actions: Actions) -> dict[str, float]:
        return {"d": 1.0}


class RewardIsText(Right):
    def reward(self, actions: Actions) -> Any:
        return {"a": "1"}


class ObservationOfText(Right):
    def now(self, rewards: dict[str, float]) -> Situation:
        situation = super().now(rewards)
        texts: Any = {agent: new.text for agent, new in situation.observations.items()}
        return Situation(situation.to_act, self.together, texts, rewards, self.info())


class RewardsAtReset(Right):
    def reset(self, seed: int) -> Situation:
        super().reset(seed)
        self.situation = self.now({"a": 1.0})
        return self.situation


class AsksWhoWasShownNothing(Right):
    def now(self, rewards: dict[str, float]) -> Situation:
        situation = super().now(rewards)
        shown = {agent: new for agent, new in situation.observations.items() if agent != "b"}
        return Situation(situation.to_act, self.together, shown, rewards, self.info())


class InfiniteReward(Right):
    def reward(self, actions: Actions) -> dict[str, float]:
        return dict.fromkeys(super().reward(actions), float("inf"))


class InfoIsNotJson(Right):
    def info(self) -> dict[Any, Any]:
        return {"seen": {1, 2}}


class NeverEnds(Right):
    def step(self, actions: Actions) -> Situation:
        self.rounds = 2 if self.rounds else 0
        return super().step(actions)


class NeverEndsAndSaysSo(NeverEnds):
    unlimited = True


class StepsAfterTheEnd(Right):
    def check(self, actions: Actions) -> None:
        if self.number and not self.rounds:
            self.rounds = 1
            return
        super().check(actions)


class RefusesWithAnotherError(Right):
    def check(self, actions: Actions) -> None:
        assert not self.situation.done, "no episode is running"
        super().check(actions)


class CountsItsEpisodes(Right):
    episodes = 0

    def reset(self, seed: int) -> Situation:
        self.episodes += 1
        return super().reset(seed)

    def info(self) -> dict[Any, Any]:
        return {"episodes": self.episodes}


class DiffersByInstance(Right):
    count = itertools.count()

    def __init__(self, split: Split = "train") -> None:
        super().__init__(split)
        self.offset = next(self.count)

    def draw(self, seed: int) -> int:
        return super().draw(seed) + 4 * self.offset


class DiffersByHashSeed(Right):
    def draw(self, seed: int) -> int:
        return super().draw(hash(f"text {seed}"))


class SharesItsState(Right):
    """All instances play on one board."""

    board: dict[str, int] = {}  # noqa: RUF012 - the fault

    def reset(self, seed: int) -> Situation:
        situation = super().reset(seed)
        self.board["number"] = self.number
        return situation

    def is_right(self, action: Action | None) -> bool:
        return action is not None and action.text == str(self.board["number"])


class BoundToItsThread(Right):
    def __init__(self, split: Split = "train") -> None:
        super().__init__(split)
        self.thread = threading.get_ident()

    def step(self, actions: Actions) -> Situation:
        assert self.thread == threading.get_ident(), "called from another thread"
        return super().step(actions)


class SplitsOverlap(Right):
    def draw(self, seed: int) -> int:
        return random.Random(seed).randrange(10)


class SeedsTheGlobalGenerator(Right):
    def draw(self, seed: int) -> int:
        random.seed(seed)
        return 4 * random.randrange(10**6) + (self.split == "held_out")


class FirstGivenIsFirst(Right):
    """A race that the order of the dictionary decides."""

    def reward(self, actions: Actions) -> dict[str, float]:
        right = [agent for agent, action in actions.items() if self.is_right(action)]
        return dict.fromkeys(right[:1], 1.0)


class TakesAnything(Right):
    def check(self, actions: Actions) -> None:
        if self.situation.done:
            raise RuntimeError("no episode is running")


class ChangesBeforeItRefuses(Right):
    def check(self, actions: Actions) -> None:
        if self.situation.done:
            raise RuntimeError("no episode is running")
        self.rounds += not set(actions) <= set(self.agents)
        super().check(actions)


class NobodyMayLeave(Right):
    def reward(self, actions: Actions) -> dict[str, float]:
        return {agent: 1.0 for agent, action in actions.items() if action.text == str(self.number)}  # type: ignore[union-attr]


class AsksWhoLeft(Right):
    def playing(self) -> tuple[str, ...]:
        return self.agents


class RecomputesWrongly(Right):
    def recompute(self, seed: int, steps: Sequence[Spoken]) -> list[dict[str, float]]:
        return [{} for _ in steps]


class RecomputingDisturbs(Right):
    def recompute(self, seed: int, steps: Sequence[Spoken]) -> list[dict[str, float]]:
        found = super().recompute(seed, steps)
        self.reset(seed)
        return found


class DemonstratesToAll(Right):
    def demonstration(self, agent: str) -> Action:
        if self.situation.done:
            raise RuntimeError("no episode is running")
        return Action(str(self.number))


class DemonstratesDifferently(Right):
    count = itertools.count()

    def is_right(self, action: Action | None) -> bool:
        return False

    def recompute(self, seed: int, steps: Sequence[Spoken]) -> list[dict[str, float]]:
        return [{} for _ in steps]

    def demonstration(self, agent: str) -> Action:
        return Action(f"{super().demonstration(agent).text} {next(self.count)}")


class DemonstratingIsAMove(Right):
    def demonstration(self, agent: str) -> Action:
        action = super().demonstration(agent)
        self.number += 4
        return action

    def is_right(self, action: Action | None) -> bool:
        return False

    def recompute(self, seed: int, steps: Sequence[Spoken]) -> list[dict[str, float]]:
        return [{} for _ in steps]


class Holds(Right):
    """Holds a pipe, rightly given back."""

    def __init__(self, split: Split = "train") -> None:
        super().__init__(split)
        self.pipe: tuple[int, ...] = os.pipe()

    def close(self) -> None:
        for end in self.pipe:
            os.close(end)
        self.pipe = ()


class ClosesOnce(Holds):
    def close(self) -> None:
        if not self.pipe:
            raise RuntimeError("closed already")
        super().close()


class ClosesAfterPlayAlone(Holds):
    def close(self) -> None:
        assert self.number, "nothing was played"
        super().close()


class KeepsItsPipe(Holds):
    def close(self) -> None:
        pass


class HasNoClose(Right):
    """Leaves a pipe to nobody."""

    def __init__(self, split: Split = "train") -> None:
        super().__init__(split)
        self.pipe = os.pipe()


class ClosesForAll(Right):
    closed: Mapping[str, int] = {}

    def __init__(self, split: Split = "train") -> None:
        super().__init__(split)
        type(self).closed = {}

    def step(self, actions: Actions) -> Situation:
        assert not self.closed, "closed"
        return super().step(actions)

    def close(self) -> None:
        type(self).closed = {"closed": 1}
