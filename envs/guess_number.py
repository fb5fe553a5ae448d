"""`guess_number`: find the secret number of a range in several turns, told `higher` or `lower` after each."""

import re
from dataclasses import dataclass
from random import Random

from envs.arguments import require
from envs.draws import draws_needed, split_of, stable_hash
from envs.protocol import Action, Observation, Split, StepResult

MAX_NUMBER = 10**6
_INTEGER = re.compile(r"-?[0-9]+")
_MAX_LENGTH = 20
"""Longer runs of digits count as no number: Python refuses to read very long ones."""


@dataclass(frozen=True)
class _Secret:
    """What is played: a range, which the agent is shown, and the number in it, which it is not."""

    low: int
    high: int
    number: int

    @property
    def shown(self) -> str:
        return f"{self.low}-{self.high}"

    @property
    def par(self) -> int:
        """Guesses after which bisection has always found the number."""
        return _bisections(self.low, self.high)


class GuessNumber:
    """Find a secret number by guesses that are answered `higher` or `lower`; reward 1 when found.

    The episode shows a range, as in `3-17?`, and the first integer of each action is a guess; an
    action without one is answered `no number`. Either uses up an attempt. All rewards but that of
    finding the number are 0.

    Which split a problem is in is decided by its range: `held_out` plays ranges that `train` never
    shows, with secrets drawn from the whole of them.

    Args:
        low: the smallest number of any range, 0 or more.
        high: the largest.
        least: how many numbers a range has at least.
        attempts: actions an episode; at least as many as bisection may need for `low` to `high`.
            None: as many as bisection may need for the range that is shown.
        discount: the reward's factor for each guess beyond those that bisection may need. Fewer
            earn no more than 1: that would be luck, and the demonstrations rely on none.
        instruction: text put before the range.
        held_out: share of all ranges that is held out.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        low: int = 1,
        high: int = 31,
        least: int = 4,
        attempts: int | None = None,
        discount: float = 1.0,
        instruction: str = "",
        held_out: float = 0.2,
    ) -> None:
        require("low", low, 0 <= low < MAX_NUMBER, f"0 to {MAX_NUMBER - 1}")
        require("high", high, low < high <= MAX_NUMBER, f"{low + 1} to {MAX_NUMBER}, as low is {low}")
        count = high - low + 1
        require("least", least, 2 <= least <= count, f"2 to {count}, the numbers from low to high")
        needed = _bisections(low, high)
        enough = attempts is None or attempts >= needed
        require("attempts", attempts, enough, f"{needed} or more, which bisection of {low}-{high} may need")
        require("discount", discount, 0 <= discount <= 1, "0 to 1")
        require("held_out", held_out, 0 <= held_out < 1, "at least 0, less than 1")
        self._split: Split = split
        self._low, self._high, self._least = low, high, least
        self._attempts = attempts
        self._discount = discount
        self._instruction = instruction
        self._held_out = held_out
        self._secret: _Secret | None = None
        self._used = self._left = self._unreadable = 0
        self._open = (0, 0)
        """What the answers so far leave possible: the smallest and the largest number."""
        self._draw(0)

    def reset(self, seed: int) -> Observation:
        """Start the episode of `seed`: a range is shown."""
        self._secret = secret = self._draw(seed)
        self._used, self._unreadable = 0, 0
        self._left = self._attempts or secret.par
        self._open = (secret.low, secret.high)
        return Observation.user(f"{self._instruction}{secret.shown}?")

    def step(self, action: Action) -> StepResult:
        """Answer a guess; the right one, or the last attempt, ends the episode.

        Raises:
            RuntimeError: no episode is running.
        """
        secret = self._running()
        guess = _read(action.text)
        self._used += 1
        self._unreadable += guess is None
        found = guess == secret.number
        self._left = 0 if found else self._left - 1
        info = {
            "problem": secret.shown,
            "answer": secret.number,
            "correct": found,
            "guesses": self._used,
            "unreadable": self._unreadable,
        }
        if found:
            return StepResult(Observation(()), self._worth(secret), True, info)
        answer = "no number" if guess is None else self._compare(guess, secret.number)
        if self._left:
            return StepResult(Observation.user(f"\n{answer}?"), 0.0, False, info)
        return StepResult(Observation(()), 0.0, True, info)

    def demonstration(self) -> Action:
        """The middle of what the answers so far leave possible; it knows no more than the agent does."""
        self._running()
        smallest, largest = self._open
        return Action(str((smallest + largest) // 2))

    def _compare(self, guess: int, number: int) -> str:
        """Say where the number is, and remember what that excludes."""
        smallest, largest = self._open
        if guess < number:
            self._open = (max(smallest, guess + 1), largest)
            return "higher"
        self._open = (smallest, min(largest, guess - 1))
        return "lower"

    def _worth(self, secret: _Secret) -> float:
        return float(self._discount ** max(0, self._used - secret.par))

    def _running(self) -> _Secret:
        if self._secret is None or self._left == 0:
            raise RuntimeError("no episode is running: call reset first")
        return self._secret

    def _draw(self, seed: int) -> _Secret:
        """Draw until a range of the split comes: uniform over the split, and fixed by the seed."""
        # two different ends of the ranges, shortened by what all have in common, are one range each
        ends = range(self._low, self._high - self._least + 3)
        # where there are few ranges, a split may be a smaller share than was asked for
        for draw in range(10 * draws_needed(self._split, self._held_out)):
            random = Random(stable_hash("guess_number", seed, draw))
            low, high = sorted(random.sample(ends, 2))
            high += self._least - 2
            if split_of(f"{low}-{high}", self._held_out) == self._split:
                return _Secret(low, high, random.randint(low, high))
        raise ValueError(f"held_out: {self._held_out!r} leaves no range in the split {self._split!r}")


def _bisections(low: int, high: int) -> int:
    """Guesses that bisection of a range needs at most: n guesses search 2**n - 1 numbers."""
    return (high - low + 1).bit_length()


def _read(text: str) -> int | None:
    found = _INTEGER.search(text)
    return int(found[0]) if found and len(found[0]) <= _MAX_LENGTH else None
