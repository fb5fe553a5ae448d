"""Problems of dividing items, and what is said about them; nothing here has a state.

A kind of item is a place in a row of digits: `213` are two of the first kind, one of the second and
three of the third.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations, product
from random import Random
from typing import Literal

Row = tuple[int, ...]
"""By kind of item: how many, or how much one is worth."""
Division = tuple[Row, ...]
"""By agent: what it gets."""
WORTH = 10
"""What all items together are worth to each agent."""
_MOVE = re.compile(r"\[([0-9 ,/]*)\]|\b(ok|bye)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Problem:
    """How many items there are of each kind, and what one is worth to each agent."""

    counts: Row
    values: tuple[Row, ...]

    def canonical(self) -> str:
        """The same text whichever way kinds and agents are numbered."""
        return str(min(self._ordered(order) for order in permutations(range(len(self.counts)))))

    def _ordered(self, order: Sequence[int]) -> tuple[Row, list[Row]]:
        """The problem with its kinds in another order, and its agents in that of their values."""
        rows = [tuple(row[kind] for kind in order) for row in (self.counts, *self.values)]
        return rows[0], sorted(rows[1:])

    def worths(self, division: Division) -> list[int]:
        """What a division is worth, by agent."""
        return [worth(share, row) for share, row in zip(division, self.values, strict=True)]

    def is_pareto(self, division: Division) -> bool:
        """Whether no other division is better for one agent and worse for none."""
        reached = self.worths(division)
        for other in divisions(self.counts, len(self.values)):
            worths = self.worths(other)
            if worths != reached and all(one >= two for one, two in zip(worths, reached, strict=True)):
                return False
        return True


def worth(share: Row, values: Row) -> int:
    """What a share is worth to who has these values."""
    return sum(count * value for count, value in zip(share, values, strict=True))


def shares(counts: Row) -> Iterator[Row]:
    """All that one agent can get."""
    return product(*(range(count + 1) for count in counts))


def divisions(counts: Row, agents: int) -> Iterator[Division]:
    """All divisions of all items among so many agents."""
    if agents == 1:
        yield (counts,)
        return
    for share in shares(counts):
        for others in divisions(minus(counts, share), agents - 1):
            yield (share, *others)


def minus(counts: Row, share: Row) -> Row:
    """What is left of the items; negative where there are not so many."""
    return tuple(count - taken for count, taken in zip(counts, share, strict=True))


def written(row: Row) -> str:
    """A row of digits."""
    return "".join(map(str, row))


def read_move(text: str, speaker: int, counts: Row, agents: int) -> Division | Literal["ok", "bye"] | None:
    """What a message does: its first `[...]`, `ok` or `bye`; None: it only talks.

    An offer has a digit for each kind: what the speaker gets, then, with more than two agents, what the
    following ones get, in their order and round to the first; the last gets what is left.
    """
    found = _MOVE.search(text)
    if found is None:
        return None
    if found[2]:
        return "ok" if found[2].lower() == "ok" else "bye"
    digits = [int(char) for char in found[1] if char.isdigit()]
    kinds = len(counts)
    if len(digits) != kinds * (agents - 1):
        return None
    rows = [tuple(digits[start : start + kinds]) for start in range(0, len(digits), kinds)]
    rest = counts
    for row in rows:
        rest = minus(rest, row)
    if min(rest) < 0:
        return None
    rows.append(rest)
    return tuple(rows[(agent - speaker) % agents] for agent in range(agents))


def written_offer(division: Division, speaker: int) -> str:
    """An offer as its speaker says it."""
    agents = len(division)
    return f"[{'/'.join(written(division[(speaker + step) % agents]) for step in range(agents - 1))}]"


def draw_problem(random: Random, agents: int, kinds: int, least: int, most: int) -> Problem | None:
    """Draw numbers of items, `least` to `most` in all, and values; None: these do not fit each other.

    As in "Deal or No Deal?" (Lewis et al. 2017, arXiv:1706.05125, section 2.1): all items together are
    worth 10 to each, every kind is worth something to somebody, and some kind to more than one. No
    value has two digits.
    """
    total = random.randint(least, most)
    cuts = sorted(random.sample(range(1, total), kinds - 1))
    counts = tuple(end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True))
    rows = _rows_of_values(counts)
    if not rows:
        return None
    values = tuple(random.choice(rows) for _ in range(agents))
    wanting = [sum(row[kind] > 0 for row in values) for kind in range(kinds)]
    return Problem(counts, values) if min(wanting) >= 1 and max(wanting) >= 2 else None


@lru_cache(maxsize=1000)
def _rows_of_values(counts: Row) -> tuple[Row, ...]:
    """All values of one digit at which the items are worth `WORTH`."""
    return tuple(row for row in product(range(10), repeat=len(counts)) if worth(counts, row) == WORTH)
