"""`collect`: three or more agents move on one grid at the same time, each picking up items of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from envs.arguments import require
from envs.draws import draws_needed, split_of, stable_hash
from envs.multi import Actions, Situation, Spoken, check_actions, require_turn
from envs.protocol import Action, Observation, Split

Point = tuple[int, int]
"""Row and column, from 0 from the top left."""
MOVES: dict[str, Point] = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1), ".": (0, 0)}
"""What the first of these letters in an action does: rows and columns to go."""


@dataclass(frozen=True)
class _Layout:
    """Where everything lies at the start; by number of agent."""

    starts: tuple[Point, ...]
    items: tuple[frozenset[Point], ...]

    def __str__(self) -> str:
        groups = [[start, *sorted(items)] for start, items in zip(self.starts, self.items, strict=True)]
        return "|".join(" ".join(_written(point) for point in group) for group in groups)


class Collect:
    """Agents `a1`, `a2`, ... step up, down, left, right (`u d l r`) or stay (`.`), all at once.

    Each has items that only it can pick up, by being where one lies; no two agents' items share a
    point. An item earns its agent 1 / `items` in the round it is picked up, so that an agent's
    rewards sum to at most 1, and follow from its own moves alone. Agents pass through each other;
    the border stops them. Who has all its items is asked no more.

    An agent sees `23 04 41|12 30>`: it stands in row 2, column 3, its items lie at 0,4 and 4,1, and
    the others stand at 1,2 and 3,0. The first letter of `u d l r .` in its action counts; an action
    without one stays.

    The demonstrations go to the nearest item, which with time enough collects all of them.

    A problem is the layout at the start; none is in both splits.

    Args:
        agents: how many, 3 to 8.
        size: rows and columns, 3 to 10.
        items: of each agent.
        rounds: the episode's limit; at the last one it ends, whatever is left.
        others: show where the others stand.
        held_out: share of all problems that is held out.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        agents: int = 3,
        size: int = 5,
        items: int = 2,
        rounds: int = 12,
        others: bool = True,
        held_out: float = 0.2,
    ) -> None:
        require("agents", agents, 3 <= agents <= 8, "3 to 8")
        require("size", size, 3 <= size <= 10, "3 to 10")
        room = (size**2 - 1) // agents
        require("items", items, 1 <= items <= room, f"1 to {room}, as {agents} agents share {size**2} points")
        require("rounds", rounds, rounds >= 1, "1 or more")
        require("held_out", held_out, 0 <= held_out < 1, "at least 0, less than 1")
        self._split: Split = split
        self._names = tuple(f"a{number}" for number in range(1, agents + 1))
        self._size, self._items, self._rounds = size, items, rounds
        self._show_others = others
        self._held_out = held_out
        self._at: dict[str, Point] = {}
        self._left: dict[str, set[Point]] = {}
        self._gone: list[str] = []
        self._played = self._unreadable = 0
        self._situation = Situation(())
        self._draw(0)

    @property
    def agents(self) -> tuple[str, ...]:
        """`a1`, `a2`, ..."""
        return self._names

    def reset(self, seed: int) -> Situation:
        """Start the episode of `seed`: each sees where it stands and where its items lie."""
        layout = self._draw(seed)
        self._at = dict(zip(self._names, layout.starts, strict=True))
        self._left = {name: set(items) for name, items in zip(self._names, layout.items, strict=True)}
        self._gone, self._played, self._unreadable = [], 0, 0
        self._situation = self._now({}, first=True)
        return self._situation

    def step(self, actions: Actions) -> Situation:
        """Move all that are to act at once.

        Raises:
            RuntimeError: no episode is running.
            ValueError: an action is missing, or one too many.
        """
        check_actions(self._situation, actions, self._gone)
        rewards: dict[str, float] = {}
        for name in self._names:
            action = actions.get(name)
            if action is not None:
                self._at[name] = self._moved(name, action)
                if self._at[name] in self._left[name]:
                    self._left[name].remove(self._at[name])
                    rewards[name] = 1 / self._items
            elif name in actions:
                self._gone.append(name)
        self._played += 1
        self._situation = self._now(rewards)
        return self._situation

    def recompute(self, seed: int, steps: Sequence[Spoken]) -> list[dict[str, float]]:
        """Walk each agent by itself along its own moves; by name of agent, round for round."""
        layout, rewards = self._draw(seed), [dict[str, float]() for _ in steps]
        for name, start, items in zip(self._names, layout.starts, layout.items, strict=True):
            (row, column), found = start, set[Point]()
            for number, step in enumerate(steps[: self._rounds]):
                letter = next((char for char in step.get(name) or "" if char in MOVES), ".")
                if name not in step or len(found) == len(items):
                    continue
                if step[name] is None:
                    break
                row = min(self._size - 1, max(0, row + MOVES[letter][0]))
                column = min(self._size - 1, max(0, column + MOVES[letter][1]))
                if (row, column) in items - found:
                    found.add((row, column))
                    rewards[number][name] = 1 / len(items)
        return rewards

    def demonstration(self, agent: str) -> Action:
        """A step towards the nearest of the agent's items, rows first."""
        require_turn(self._situation, agent)
        row, column = self._at[agent]
        items = sorted(self._left[agent], key=lambda item: (abs(item[0] - row) + abs(item[1] - column), item))
        down, right = items[0][0] - row, items[0][1] - column
        return Action(("d" if down > 0 else "u") if down else ("r" if right > 0 else "l"))

    def _moved(self, name: str, action: Action) -> Point:
        letter = next((char for char in action.text if char in MOVES), None)
        self._unreadable += letter is None
        down, right = MOVES[letter or "."]
        row, column = self._at[name][0] + down, self._at[name][1] + right
        inside = 0 <= row < self._size, 0 <= column < self._size
        return (row if inside[0] else self._at[name][0], column if inside[1] else self._at[name][1])

    def _now(self, rewards: dict[str, float], first: bool = False) -> Situation:
        playing = tuple(name for name in self._names if self._left[name] and name not in self._gone)
        to_act = playing if self._played < self._rounds else ()
        shown = {name: Observation.user(("" if first else "\n") + self._view(name)) for name in to_act}
        info = {
            "rounds": self._played,
            "left": {name: len(items) for name, items in self._left.items()},
            "gone": list(self._gone),
            "unreadable": self._unreadable,
        }
        return Situation(to_act, together=True, observations=shown, rewards=rewards, info=info)

    def _view(self, name: str) -> str:
        own = [self._at[name], *sorted(self._left[name])]
        others = [self._at[other] for other in self._names if other != name and other not in self._gone]
        seen = f"|{' '.join(map(_written, others))}" if self._show_others else ""
        return f"{' '.join(map(_written, own))}{seen}>"

    def _draw(self, seed: int) -> _Layout:
        """Draw layouts until one of the split comes: fixed by the seed."""
        points: list[Point] = list(product(range(self._size), range(self._size)))
        # where there are few problems, a split may be a smaller share than was asked for
        for draw in range(10 * draws_needed(self._split, self._held_out)):
            random = Random(stable_hash("collect", seed, draw))
            lying = random.sample(points, len(self._names) * self._items)
            free = [point for point in points if point not in set(lying)]
            starts = tuple(random.choice(free) for _ in self._names)
            items = tuple(frozenset(lying[i :: len(self._names)]) for i in range(len(self._names)))
            layout = _Layout(starts, items)
            if split_of(str(layout), self._held_out) == self._split:
                return layout
        raise ValueError(f"held_out: {self._held_out!r} leaves no layout in the split {self._split!r}")


def _written(point: Point) -> str:
    return f"{point[0]}{point[1]}"
