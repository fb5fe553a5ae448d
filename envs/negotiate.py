"""`negotiate`: two or more agents talk about who gets which items, each with values that only it knows.

In the manner of "Deal or No Deal? End-to-End Learning for Negotiation Dialogues" (Lewis et al. 2017,
arXiv:1706.05125), where two people talk freely and then each enters a division. Here a division is
offered in brackets within a message, and accepted by another, so that a log shows what was agreed on.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Literal

from envs.arguments import require
from envs.draws import draws_needed, split_of, stable_hash
from envs.multi import Actions, Situation, Spoken, check_actions, require_turn
from envs.negotiate_player import View, say
from envs.negotiate_rules import WORTH, Division, Problem, draw_problem, read_move, written
from envs.protocol import Action, Observation, Split

_TRIES = 1000
"""Draws of items and values for one that fits: most do, save of very few items."""


class Negotiate:
    """Agents `a1`, `a2`, ... agree on a division of items, or get nothing.

    Each is shown how many items there are of each kind and what one is worth to it: `213|151` are two,
    one and three, worth 1, 5 and 1. All together are worth 10 to everybody. Messages go to all others.
    `[201]` in a message offers a division: two of the first kind and one of the third for who says it,
    the rest for the other; with more agents `[201/010]` also tells what the next one gets. `ok` accepts
    the offer made last, and `bye` ends the talk without a deal; the first of these in a message
    counts, and everything else is talk. An offer of what there is not is talk as well. The others hear
    the message in one line, and what an offer gives them: `a1:[201] you=012`.

    With a deal (all others have accepted an offer) each earns what its share is worth to it, divided
    by 10; without one nobody earns anything: when one says `bye` or leaves, or when nobody may speak any
    more. A message that comes at the same time as others is about the offer that stood before it; of
    several offers made at once, that of the first in order of turns stands.

    The demonstrations ask for much, concede with time, and know no more than their agent does.

    A problem is the items and all values, whatever the order of kinds and agents; none is in both splits.

    Args:
        agents: how many, 2 to 4.
        kinds: of items, 2 to 4.
        least: items in all, at least.
        most: items in all, at most.
        messages: that each agent has.
        order: `alternating`: one speaks after the other, who begins is drawn; `free`: who has
            heard something new since it spoke, and at first all.
        width: characters of a message that are heard and count.
        instruction: text put before everything else.
        held_out: share of all problems that is held out.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        agents: int = 2,
        kinds: int = 3,
        least: int = 5,
        most: int = 7,
        messages: int = 4,
        order: Literal["alternating", "free"] = "alternating",
        width: int = 80,
        instruction: str = "",
        held_out: float = 0.2,
    ) -> None:
        require("agents", agents, 2 <= agents <= 4, "2 to 4")
        require("kinds", kinds, 2 <= kinds <= 4, "2 to 4")
        require("least", least, kinds < least <= 9, f"{kinds + 1} to 9, as there are {kinds} kinds")
        require("most", most, least <= most <= 9, f"{least} to 9, as least is {least}")
        require("messages", messages, 2 <= messages <= 50, "2 to 50")
        require("order", order, order in ("alternating", "free"), "alternating, free")
        shortest = 2 + kinds * (agents - 1)
        require("width", width, width >= shortest, f"{shortest} or more, the length of an offer")
        require("held_out", held_out, 0 <= held_out < 1, "at least 0, less than 1")
        self._split: Split = split
        self._names = tuple(f"a{number}" for number in range(1, agents + 1))
        self._size = (agents, kinds, least, most)
        self._messages, self._width = messages, width
        self._alternating = order == "alternating"
        self._instruction = instruction
        self._held_out = held_out
        self._problem, self._first = self._draw(0)
        self._offers: list[tuple[int, Division]] = []
        self._accepted: set[int] = set()
        """Who accepted the last offer; its author did."""
        self._spoken: dict[str, int] = {}
        self._situation = Situation(())

    @property
    def agents(self) -> tuple[str, ...]:
        """`a1`, `a2`, ..."""
        return self._names

    def reset(self, seed: int) -> Situation:
        """Start the talk of `seed`: each sees the items and its own values."""
        self._problem, self._first = self._draw(seed)
        self._offers, self._accepted = [], set()
        self._spoken = dict.fromkeys(self._names, 0)
        to_act = self._turns()[:1] if self._alternating else self._names
        shown = {}
        for name, values in zip(self._names, self._problem.values, strict=True):
            seen = f"{self._instruction}{written(self._problem.counts)}|{written(values)}"
            shown[name] = Observation.user(f"{seen}\n{name}:" if name in to_act else seen)
        self._situation = Situation(to_act, observations=shown)
        return self._situation

    def step(self, actions: Actions) -> Situation:
        """Hear the messages of one or more agents.

        Raises:
            RuntimeError: nobody talks.
            ValueError: it is not this agent's turn.
        """
        check_actions(self._situation, actions)
        if left := [name for name in self._names if name in actions and actions[name] is None]:
            return self._end("left", left)
        heard = {
            name: _one_line(action.text, self._width)
            for name in self._turns()
            if (action := actions.get(name)) is not None
        }
        moves = {name: self._read(name, text) for name, text in heard.items()}
        for name in heard:
            self._spoken[name] += 1
        if walked := [name for name in self._names if moves.get(name) == "bye"]:
            return self._end("walked", walked)
        self._accepted |= {self._names.index(name) for name, move in moves.items() if move == "ok"}
        if self._offers and len(self._accepted) == len(self._names):
            return self._end("deal")
        offers = {name: move for name, move in moves.items() if isinstance(move, tuple)}
        self._take(offers)
        return self._go_on(heard, offers)

    def demonstration(self, agent: str) -> Action:
        """What a negotiator says who asks for much, concedes with time, and takes what is good enough."""
        require_turn(self._situation, agent)
        index = self._names.index(agent)
        view = View(
            agent=index,
            agents=len(self._names),
            counts=self._problem.counts,
            values=self._problem.values[index],
            offers=self._offers,
            stands=bool(self._offers) and self._offers[-1][0] != index,
            spoken=self._spoken[agent],
            messages=self._messages,
        )
        return Action(say(view))

    def recompute(self, seed: int, steps: Sequence[Spoken]) -> list[dict[str, float]]:
        """Find in a log what was agreed on, if anything; what comes after the end earns nothing."""
        problem, first = self._draw(seed)
        turns = self._names[first:] + self._names[:first]
        rewards = [dict[str, float]() for _ in steps]
        stands: Division | None = None
        content: set[str] = set()
        for number, step in enumerate(steps):
            said: dict[str, Any] = {}
            for name in turns:
                if (text := step.get(name)) is not None:
                    line = _one_line(text, self._width)
                    said[name] = read_move(line, self._names.index(name), problem.counts, len(self._names))
            if None in step.values() or "bye" in said.values():
                break
            content |= {name for name, move in said.items() if move == "ok" and stands}
            if len(content) == len(self._names) and stands:
                worths = zip(self._names, problem.worths(stands), strict=True)
                rewards[number] = {name: value / WORTH for name, value in worths if value}
                break
            made = [name for name, move in said.items() if isinstance(move, tuple)]
            if made:
                stands, content = said[made[0]], {made[0]}
        return rewards

    def _turns(self) -> tuple[str, ...]:
        """The agents in order of turns."""
        return self._names[self._first :] + self._names[: self._first]

    def _read(self, name: str, text: str) -> Division | str | None:
        return read_move(text, self._names.index(name), self._problem.counts, len(self._names))

    def _take(self, offers: Mapping[str, Division]) -> None:
        """The first of some offers stands from now on; the others were made."""
        made = [(self._names.index(name), division) for name, division in offers.items()]
        if made:
            self._offers += [*made[1:], made[0]]
            self._accepted = {made[0][0]}

    def _go_on(self, heard: Mapping[str, str], offers: Mapping[str, Division]) -> Situation:
        """Tell the others what was said, and find who may speak next."""
        to_act = self._next(heard)
        if not to_act:
            return self._end("timeout")
        shown = {}
        for index, name in enumerate(self._names):
            lines = ""
            for speaker, text in heard.items():
                if speaker != name:
                    gives = f" you={written(offers[speaker][index])}" if speaker in offers else ""
                    lines += f"\n{speaker}:{text}{gives}"
            if name in to_act:
                lines += f"\n{name}:"
            if lines:
                shown[name] = Observation.user(lines)
        self._situation = Situation(to_act, observations=shown)
        return self._situation

    def _next(self, heard: Mapping[str, str]) -> tuple[str, ...]:
        """Who may speak now; nobody: there are no messages left."""
        able = [name for name in self._names if self._spoken[name] < self._messages]
        if self._alternating:
            turns, said = self._turns(), sum(self._spoken.values())
            return (turns[said % len(turns)],) if able else ()
        return tuple(name for name in able if set(heard) - {name})

    def _end(self, how: str, by: Sequence[str] = ()) -> Situation:
        """End the talk: with a deal by the last offer, or without one."""
        info: dict[str, Any] = {
            "how": how,
            "by": list(by),
            "messages": sum(self._spoken.values()),
            "offers": len(self._offers),
            "counts": written(self._problem.counts),
            "values": dict(zip(self._names, map(written, self._problem.values), strict=True)),
        }
        rewards: dict[str, float] = {}
        if how == "deal":
            division = self._offers[-1][1]
            worths = zip(self._names, self._problem.worths(division), strict=True)
            rewards = {name: value / WORTH for name, value in worths if value}
            info["shares"] = dict(zip(self._names, map(written, division), strict=True))
            info["pareto"] = self._problem.is_pareto(division)
        self._situation = Situation((), rewards=rewards, info=info)
        return self._situation

    def _draw(self, seed: int) -> tuple[Problem, int]:
        """Draw problems until one of the split comes, and who begins: fixed by the seed."""
        # where there are few problems, a split may be a smaller share than was asked for
        for draw in range(_TRIES * draws_needed(self._split, self._held_out)):
            random = Random(stable_hash("negotiate", seed, draw))
            problem = draw_problem(random, *self._size)
            if problem is not None and split_of(problem.canonical(), self._held_out) == self._split:
                return problem, random.randrange(len(self._names))
        raise ValueError(f"held_out: {self._held_out!r} leaves no problem in the split {self._split!r}")


def _one_line(text: str, width: int) -> str:
    """A message as it is heard: nobody can speak in another's name by breaking a line."""
    return " ".join(text.split())[:width]
