"""A right environment, and one for each promise that it can break."""

import itertools
import os
import random
import threading
from typing import Any

from envs.protocol import Action, Call, Message, Observation, Split, StepResult


class Right:
    """Guess a number; two turns at most."""

    def __init__(self, split: Split = "train") -> None:
        self.split = split
        self.number, self.left = 0, 0

    def draw(self, seed: int) -> int:
        number = random.Random(seed).randrange(10**6)
        return number - number % 4 + (3 if self.split == "held_out" else number % 3)

    def reset(self, seed: int) -> Observation:
        self.number, self.left = self.draw(seed), 2
        return Observation.user(f"say {self.number}: ")

    def reward(self, action: Action) -> float:
        return float(action.text == str(self.number))

    def result(self, reward: float, done: bool) -> StepResult:
        return StepResult(
            Observation(()) if done else Observation.user("again: "), reward, done, {"left": self.left}
        )

    def step(self, action: Action) -> StepResult:
        if not self.left:
            raise RuntimeError("no episode is running")
        reward = self.reward(action)
        self.left = 0 if reward else self.left - 1
        return self.result(reward, self.left == 0)

    def demonstration(self) -> Action:
        return Action(str(self.number))


class RaisesOnText(Right):
    def reward(self, action: Action) -> float:
        return float(int(action.text) == self.number)


class ReturnsATuple(Right):
    def step(self, action: Action) -> Any:
        result = super().step(action)
        return result.observation, result.reward, result.done, result.info


class ObservationOfText(Right):
    def reset(self, seed: int) -> Any:
        return super().reset(seed).text


class FirstObservationIsEmpty(Right):
    def reset(self, seed: int) -> Observation:
        super().reset(seed)
        return Observation.user("")


class UnknownRole(Right):
    def reset(self, seed: int) -> Observation:
        return Observation((Message("narrator", super().reset(seed).text),))  # type: ignore[arg-type]


class RewardIsText(Right):
    def result(self, reward: float, done: bool) -> StepResult:
        return StepResult(Observation(()), str(reward), done)  # type: ignore[arg-type]


class DoneIsANumber(Right):
    def result(self, reward: float, done: bool) -> StepResult:
        return StepResult(Observation(()), reward, int(done))  # type: ignore[arg-type]


class InfiniteReward(Right):
    def reward(self, action: Action) -> float:
        return float("inf") if action.text == str(self.number) else 0.0


class InfoIsNotJson(Right):
    def result(self, reward: float, done: bool) -> StepResult:
        return StepResult(Observation(()), reward, done, {"seen": {1, 2}})


class InfoHasNaN(Right):
    def result(self, reward: float, done: bool) -> StepResult:
        return StepResult(Observation(()), reward, done, {"loss": float("nan")})


class InfoHasNumbersAsKeys(Right):
    def result(self, reward: float, done: bool) -> StepResult:
        return StepResult(Observation(()), reward, done, {1: 2})  # type: ignore[dict-item]


class NeverEnds(Right):
    def step(self, action: Action) -> StepResult:
        if not self.left:
            raise RuntimeError("no episode is running")
        return StepResult(Observation.user("again: "), self.reward(action), False)


class NeverEndsAndSaysSo(NeverEnds):
    unlimited = True


class StepsBeforeReset(Right):
    def __init__(self, split: Split = "train") -> None:
        super().__init__(split)
        self.left = 2


class StepsAfterTheEnd(Right):
    def step(self, action: Action) -> StepResult:
        self.left = max(self.left, 1) if self.number else 0
        return super().step(action)


class RefusesWithAnotherError(Right):
    def step(self, action: Action) -> StepResult:
        assert self.left, "no episode is running"
        return super().step(action)


class CountsItsEpisodes(Right):
    def __init__(self, split: Split = "train") -> None:
        super().__init__(split)
        self.episodes = 0

    def reset(self, seed: int) -> Observation:
        self.episodes += 1
        return Observation.user(f"{super().reset(seed).text}(round {self.episodes})")


class KeepsALeftover(Right):
    """An abandoned episode takes a turn from the next."""

    def reset(self, seed: int) -> Observation:
        left = 1 if self.left else 2
        observation = super().reset(seed)
        self.left = left
        return observation


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

    def reset(self, seed: int) -> Observation:
        observation = super().reset(seed)
        self.board["number"] = self.number
        return observation

    def result(self, reward: float, done: bool) -> StepResult:
        return StepResult(Observation(()), reward, done, {"number": self.board["number"]})


class BoundToItsThread(Right):
    def __init__(self, split: Split = "train") -> None:
        super().__init__(split)
        self.thread = threading.get_ident()

    def step(self, action: Action) -> StepResult:
        assert self.thread == threading.get_ident(), "called from another thread"
        return super().step(action)


class SplitsOverlap(Right):
    def draw(self, seed: int) -> int:
        return random.Random(seed).randrange(10)


class DemonstratesWrongly(Right):
    def demonstration(self) -> Action:
        return Action("0")

    def reward(self, action: Action) -> float:
        return float(action.text == "7")


class DemonstratesDifferently(Right):
    count = itertools.count()

    def reward(self, action: Action) -> float:
        return 0.0

    def demonstration(self) -> Action:
        return Action(f"try {next(self.count)}")


class SeedsTheGlobalGenerator(Right):
    def draw(self, seed: int) -> int:
        random.seed(seed)
        return 4 * random.randrange(10**6) + (self.split == "held_out")


class HasNoClose(Right):
    """Leaves a pipe to nobody."""

    def __init__(self, split: Split = "train") -> None:
        super().__init__(split)
        self.pipe = os.pipe()


class ClosesOnce(HasNoClose):
    def close(self) -> None:
        for end in self.pipe:
            os.close(end)


class KeepsItselfUntilCollected(Right):
    """Not broken: its pipe ends with it, which no one holds but itself."""

    def __init__(self, split: Split = "train") -> None:
        super().__init__(split)
        self.itself, self.pipe = self, os.pipe()

    def __del__(self) -> None:
        for end in self.pipe:
            os.close(end)


class WithTools:
    """Say what a tool says of a number."""

    def __init__(self, split: Split = "train") -> None:
        self.right = Right(split)

    def reset(self, seed: int) -> Observation:
        return self.right.reset(seed)

    def step(self, action: Action) -> StepResult:
        double = action.text.isdigit() and action.text == str(2 * self.right.number)
        return self.right.step(Action(str(self.right.number) if double else "wrong"))

    def demonstration_after(self, results: tuple[str, ...]) -> Any:
        return Action(results[0]) if results else (Call("double", {"of": self.right.number}),)


class CallsForEver(WithTools):
    def demonstration_after(self, results: tuple[str, ...]) -> Any:
        return super().demonstration_after(())


class CallsNothing(WithTools):
    def demonstration_after(self, results: tuple[str, ...]) -> Any:
        return ()


class CallsAnotherTool(WithTools):
    def demonstration_after(self, results: tuple[str, ...]) -> Any:
        return (Call("triple", {"of": self.right.number}),)


class CallsWithASet(WithTools):
    def demonstration_after(self, results: tuple[str, ...]) -> Any:
        return (Call("double", {"of": {self.right.number}}),)


class IgnoresItsTool(WithTools):
    def demonstration_after(self, results: tuple[str, ...]) -> Any:
        return Action("0") if results else super().demonstration_after(())

    def step(self, action: Action) -> StepResult:
        return self.right.step(Action(str(self.right.number) if action.text == "7" else "wrong"))


class CallsDifferently(WithTools):
    count = itertools.count()

    def demonstration_after(self, results: tuple[str, ...]) -> Any:
        return (Call("double", {"of": next(self.count)}),)
