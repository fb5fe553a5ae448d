"""`arithmetic`: sums, differences and products of graded difficulty, to be completed after `a+b=`."""

import re
from collections.abc import Sequence
from random import Random

from envs.arguments import require
from envs.draws import draws_needed, split_of, stable_hash
from envs.protocol import Action, Observation, Split, StepResult

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
MAX_DIGITS = 9
_FIRST_SHOTS = ((1, 1), (5, 4))
_INTEGER = re.compile(r"-?[0-9]+")

Problem = tuple[int, str, int]


class Arithmetic:
    """One problem an episode; the reward is 1 if the first integer of the action is the answer.

    Args:
        split: `held_out` plays only problems that `train` never shows, and the reverse. `3+4` and
            `4+3` are in the same split. Problems shown as examples are in neither.
        operations: which of `+`, `-`, `*`; a string of them or a list.
        digits: operands are 0 to 10**digits - 1.
        shots: solved examples before the problem; always the same ones.
        instruction: text put before everything else.
        attempts: actions per episode; a wrong one is answered by the problem again.
        partial_credit: reward of an action that contains an integer, but a wrong one.
        held_out: share of all problems that is held out.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        operations: str | Sequence[str] = "+",
        digits: int = 1,
        shots: int = 0,
        instruction: str = "",
        attempts: int = 1,
        partial_credit: float = 0.0,
        held_out: float = 0.2,
    ) -> None:
        self._operations = tuple(dict.fromkeys(operations))
        require(
            "operations",
            operations,
            bool(self._operations) and set(self._operations) <= set(OPERATIONS),
            "one or more of + - *",
        )
        require("digits", digits, 1 <= digits <= MAX_DIGITS, f"1 to {MAX_DIGITS}")
        require("shots", shots, 0 <= shots <= 8, "0 to 8")
        require("attempts", attempts, attempts >= 1, "1 or more")
        require("partial_credit", partial_credit, 0 <= partial_credit < 1, "at least 0, less than 1")
        require("held_out", held_out, 0 <= held_out < 1, "at least 0, less than 1")
        self._split: Split = split
        self._operand_end = 10**digits
        self._held_out = held_out
        self._attempts = attempts
        self._partial_credit = partial_credit
        self._shots = [self._shot(index, digits) for index in range(shots)]
        self._taken = {_canonical(shot) for shot in self._shots}
        self._prefix = instruction + "".join(f"{_asked(shot)}{_answer(shot)}\n" for shot in self._shots)
        self._problem: Problem | None = None
        self._left = 0
        self._draw(0)

    def reset(self, seed: int) -> Observation:
        """Start the episode of `seed`: the examples and one open problem."""
        self._problem = self._draw(seed)
        self._left = self._attempts
        return Observation.user(self._prefix + _asked(self._problem))

    def step(self, action: Action) -> StepResult:
        """Score the action; with attempts left, a wrong one is answered by the problem again.

        Raises:
            RuntimeError: no episode is running.
        """
        problem = self._running()
        given = _INTEGER.search(action.text)
        # Python refuses to read integers of thousands of digits; none of them is an answer
        correct = given is not None and len(given[0]) <= 100 and int(given[0]) == _answer(problem)
        self._left = 0 if correct else self._left - 1
        reward = 1.0 if correct else self._partial_credit if given else 0.0
        info = {"problem": "{}{}{}".format(*problem), "answer": _answer(problem), "correct": correct}
        if self._left:
            again = Observation.user(f"\nWrong, try again.\n{_asked(problem)}")
            return StepResult(again, reward, False, info)
        return StepResult(Observation(()), reward, True, info)

    def demonstration(self) -> Action:
        """The answer alone: what follows it (a stop token or a line break) is the renderer's matter."""
        return Action(str(_answer(self._running())))

    def _running(self) -> Problem:
        if self._problem is None or self._left == 0:
            raise RuntimeError("no episode is running: call reset first")
        return self._problem

    def _shot(self, index: int, digits: int) -> Problem:
        operation = self._operations[index % len(self._operations)]
        if digits == 1 and index < len(_FIRST_SHOTS):
            left, right = _FIRST_SHOTS[index]
            return left, operation, right
        random = Random(stable_hash("shot", digits, index))
        return random.randrange(self._operand_end), operation, random.randrange(self._operand_end)

    def _draw(self, seed: int) -> Problem:
        """Draw until a problem of the split comes: uniform over the split, and fixed by the seed."""
        # the examples are left out too, and are at most 8 of the 100 problems of the smallest set
        for draw in range(2 * draws_needed(self._split, self._held_out)):
            random = Random(stable_hash("problem", seed, draw))
            operation = random.choice(self._operations)
            problem = (random.randrange(self._operand_end), operation, random.randrange(self._operand_end))
            key = _canonical(problem)
            if key not in self._taken and split_of(key, self._held_out) == self._split:
                return problem
        raise ValueError(f"held_out: {self._held_out!r} leaves no problem in the split {self._split!r}")


def _asked(problem: Problem) -> str:
    return "{}{}{}=".format(*problem)


def _answer(problem: Problem) -> int:
    left, operation, right = problem
    return OPERATIONS[operation](left, right)


def _canonical(problem: Problem) -> str:
    """The same text for `3+4` and `4+3`: knowing one is knowing the other."""
    left, operation, right = problem
    if operation != "-":
        left, right = sorted((left, right))
    return f"{left}{operation}{right}"
