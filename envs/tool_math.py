"""`tool_math`: products and sums that are too long to do in one's head, to be solved with a calculator."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Literal

from envs.arguments import require
from envs.draws import draws_needed, split_of, stable_hash
from envs.protocol import Action, Call, Observation, Split, StepResult

CALCULATOR = "calculator"
"""The tool of the demonstrations; it takes an `expression` and answers with its value."""
OPERATIONS = "+-*"
_NUMBER = re.compile(r"(?:(?<![\w)])-)?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_MAX_LENGTH = 100
"""Longer runs of digits are no answer: Python refuses to read very long ones."""


@dataclass(frozen=True)
class _Part:
    """A chain such as `47*83-12`: numbers, and the operations between them."""

    numbers: tuple[int, ...]
    operations: tuple[str, ...]

    def __str__(self) -> str:
        rest = zip(self.operations, self.numbers[1:], strict=True)
        return str(self.numbers[0]) + "".join(f"{operation}{number}" for operation, number in rest)

    def terms(self) -> list[tuple[int, list[int]]]:
        """The chain as a sum: signs, and the factors of each term in order of size."""
        terms = [(1, [self.numbers[0]])]
        for operation, number in zip(self.operations, self.numbers[1:], strict=True):
            if operation == "*":
                terms[-1][1].append(number)
            else:
                terms.append((1 if operation == "+" else -1, [number]))
        return [(sign, sorted(factors)) for sign, factors in terms]


@dataclass(frozen=True)
class _Problem:
    """The sum of some parts."""

    parts: tuple[_Part, ...]

    def __str__(self) -> str:
        if len(self.parts) == 1 or all(set(part.operations) == {"*"} for part in self.parts):
            return "+".join(map(str, self.parts))
        return "+".join(f"({part})" for part in self.parts)

    @property
    def answer(self) -> int:
        return sum(sign * math.prod(factors) for part in self.parts for sign, factors in part.terms())

    @property
    def canonical(self) -> str:
        """The same text for what differs in the order of terms and factors alone."""
        return str(sorted(term for part in self.parts for term in part.terms()))


class ToolMath:
    """One expression an episode, as in `47*83=`; the reward is 1 if the action's last number is its value.

    Tools are the agent's own: with a calculator the answer can be copied, without one it has to be
    computed in one's head. The number may have commas between thousands, and a point with zeros.

    The demonstrations call `calculator` with an `expression`, and then say the number it gave.

    Problems that differ in the order of terms or factors alone are the same one; none is in both splits.

    Args:
        operations: which of `+`, `-`, `*`; a string of them or a list.
        digits: of each number, the first of them not 0.
        operands: numbers in a part.
        parts: the problem is the sum of so many parts, as in `47*83+56*19=`.
        demonstrate: `whole`: the whole expression in one call; `parts`: one call for each part, all
            at once, and then one for the sum of what they gave.
        instruction: text put before the expression.
        partial_credit: reward of an action with a number in it, but a wrong one.
        held_out: share of all problems that is held out.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        operations: str | Sequence[str] = "*",
        digits: int = 3,
        operands: int = 2,
        parts: int = 1,
        demonstrate: Literal["whole", "parts"] = "whole",
        instruction: str = "",
        partial_credit: float = 0.0,
        held_out: float = 0.2,
    ) -> None:
        self._operations = tuple(dict.fromkeys(operations))
        known = bool(self._operations) and set(self._operations) <= set(OPERATIONS)
        require("operations", operations, known, "one or more of + - *")
        require("digits", digits, 1 <= digits <= 9, "1 to 9")
        require("operands", operands, 2 <= operands <= 6, "2 to 6")
        require("parts", parts, 1 <= parts <= 4, "1 to 4")
        require("demonstrate", demonstrate, demonstrate in ("whole", "parts"), "whole, parts")
        require("partial_credit", partial_credit, 0 <= partial_credit < 1, "at least 0, less than 1")
        require("held_out", held_out, 0 <= held_out < 1, "at least 0, less than 1")
        self._split: Split = split
        self._numbers = range(10 ** (digits - 1), 10**digits)
        self._operands, self._parts = operands, parts
        self._by_parts = demonstrate == "parts" and parts > 1
        self._instruction = instruction
        self._partial_credit = partial_credit
        self._held_out = held_out
        self._problem: _Problem | None = None
        self._draw(0)

    def reset(self, seed: int) -> Observation:
        """Start the episode of `seed`: an expression is shown."""
        self._problem = self._draw(seed)
        return Observation.user(f"{self._instruction}{self._problem}=")

    def step(self, action: Action) -> StepResult:
        """Score the answer, which ends the episode.

        Raises:
            RuntimeError: no episode is running.
        """
        problem = self._running()
        self._problem = None
        given = _last_number(action.text)
        correct = given == problem.answer
        reward = 1.0 if correct else 0.0 if given is None else self._partial_credit
        info = {"problem": str(problem), "answer": problem.answer, "correct": correct}
        return StepResult(Observation(()), reward, True, info)

    def demonstration_after(self, results: tuple[str, ...]) -> Action | tuple[Call, ...]:
        """Calls of the calculator; with what they gave, the answer."""
        problem = self._running()
        if not self._by_parts:
            return Action(results[0].strip()) if results else (_calculate(str(problem)),)
        if not results:
            return tuple(_calculate(str(part)) for part in problem.parts)
        if len(results) == self._parts:
            return (_calculate("+".join(result.strip() for result in results)),)
        return Action(results[-1].strip())

    def _running(self) -> _Problem:
        if self._problem is None:
            raise RuntimeError("no episode is running: call reset first")
        return self._problem

    def _draw(self, seed: int) -> _Problem:
        """Draw until a problem of the split comes: fixed by the seed."""
        # where there are few problems, a split may be a smaller share than was asked for
        for draw in range(10 * draws_needed(self._split, self._held_out)):
            random = Random(stable_hash("tool_math", seed, draw))
            problem = _Problem(tuple(self._draw_part(random) for _ in range(self._parts)))
            if split_of(problem.canonical, self._held_out) == self._split:
                return problem
        raise ValueError(f"held_out: {self._held_out!r} leaves no problem in the split {self._split!r}")

    def _draw_part(self, random: Random) -> _Part:
        numbers = tuple(random.choice(self._numbers) for _ in range(self._operands))
        return _Part(numbers, tuple(random.choice(self._operations) for _ in numbers[1:]))


def _calculate(expression: str) -> Call:
    return Call(CALCULATOR, {"expression": expression})


def _last_number(text: str) -> Fraction | None:
    """The last number of a text, exactly."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    return Fraction(found[-1].replace(",", "")) if len(found[-1]) <= _MAX_LENGTH else None
