"""Small trainings without a model, on a virtual clock, to try coordinators on.

A *match*: gomoku, a good player against a frozen random one, one at a time. A *hunt*: `collect` with
three policies, all at once. In both, agents crash, are late, and die now and then, their context is
full, or the environment does not come back.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import NormalDist

from envs.collect import Collect
from envs.gomoku_match import GomokuMatch
from envs.gomoku_players import PLAYERS
from envs.gomoku_rules import Board
from envs.multi import Actions, MultiEnvironment, Recomputes, Situation
from envs.protocol import Action
from opentinker_core.agents.coordination.actors import ContextFull, Deadline, Reply, Request
from opentinker_core.agents.coordination.checker import check
from opentinker_core.agents.coordination.coordinator import EpisodePlan, EpisodeResult
from opentinker_core.agents.coordination.log import EventLog, Kind
from opentinker_core.agents.coordination.mutants import MUTANTS, Mutant
from opentinker_core.agents.coordination.phases import PhaseCoordinator
from opentinker_core.agents.coordination.protocol import CoordinationProtocol, OnDeath, TurnOrder
from opentinker_core.agents.coordination.violations import Check, Violation
from opentinker_core.agents.coordination.virtual_clock import run
from opentinker_core.seeds import derive_seed

_SIZE, _LINE = 4, 3
_SKILL = 0.5
"""Share of the good player's moves that are good; else it would win always, whatever is broken."""
_TURN_S = 10.0
_LEVEL = 0.95
"""Of the test of win rates."""


@dataclass(frozen=True)
class Verdict:
    """What the checker, and a look at the win rate, make of a coordinator."""

    name: str
    summary: str
    expected: Check | None
    """None: of the coordinator that is right."""
    violations: Sequence[Violation]
    wins: float
    """Share of the games that the good player won, as its rewards say."""
    games: int
    seen_by_win_rate: bool
    """Whether the share differs from the right coordinator's, at a level of 95 %."""

    @property
    def caught(self) -> bool:
        """Whether the check that must catch it did."""
        return self.expected is not None and self.counts.get(self.expected, 0) > 0

    @property
    def right(self) -> bool:
        """Whether the checker judged as it must."""
        return not self.violations if self.expected is None else self.caught

    @property
    def counts(self) -> dict[Check, int]:
        """Violations by check."""
        checks = [violation.check for violation in self.violations]
        return {check: checks.count(check) for check in Check if check in checks}


def verdicts(
    generations: int, episodes: int, seed: int, report: Callable[[str], None] = lambda name: None
) -> list[Verdict]:
    """Try the right coordinator, then each mutant, in the same match and the same hunt.

    `episodes`: of each generation, in each of the two.
    """
    scale = Scale(generations, episodes, seed)
    report("correct")
    reference = verdict(None, scale)
    found = [reference]
    for mutant in MUTANTS:
        report(mutant.name)
        found.append(verdict(mutant, scale, reference))
    return found


@dataclass(frozen=True)
class Scale:
    """How long the trainings are."""

    generations: int
    episodes: int
    """Of each generation, in each training."""
    seed: int


def verdict(mutant: Mutant | None, scale: Scale, reference: Verdict | None = None) -> Verdict:
    """Try one coordinator; None: the right one. `reference`: whose win rate it is compared with."""
    tried = mutant or Mutant("correct", Check.END)
    match, hunt = _Training(tried, scale, _match()), _Training(tried, scale, _hunt())
    credits = [event for event in match.log if event.kind is Kind.CREDITED and event.agent == "X"]
    rewards = [event.detail["reward"] for event in credits]
    games = [reward for reward in rewards if reward is not None]
    wins = sum(reward > 0 for reward in games) / len(games) if games else 0.0
    seen = reference is not None and differ(wins, len(games), reference.wins, reference.games)
    return Verdict(
        tried.name,
        mutant.summary if mutant else "Nothing.",
        mutant.expected if mutant else None,
        match.violations() + hunt.violations(),
        wins,
        len(games),
        seen,
    )


def differ(one: float, ones: int, other: float, others: int) -> bool:
    """Whether two shares, of so many cases each, differ: the two-sided z test of pooled proportions."""
    if not ones or not others:
        return ones != others
    pooled = (one * ones + other * others) / (ones + others)
    deviation: float = (pooled * (1 - pooled) * (1 / ones + 1 / others)) ** 0.5
    return abs(one - other) > NormalDist().inv_cdf((1 + _LEVEL) / 2) * deviation


@dataclass(frozen=True)
class _Game:
    protocol: CoordinationProtocol
    environment: Callable[[], MultiEnvironment]
    answers: Mapping[str, Callable[[Request, Random], str]]
    """By agent."""
    recomputes: Recomputes


def _match() -> _Game:
    protocol = CoordinationProtocol(
        policies={"X": "good", "O": "random"},
        frozen=("random",),
        order=TurnOrder.SEQUENTIAL,
        turn_s=_TURN_S,
        attempts=2,
        on_death=OnDeath.GO_ON,
        usable_episodes=0.0,
    )

    def environment() -> GomokuMatch:
        return GomokuMatch(size=_SIZE, line=_LINE)

    answers = {"X": _played_by(_SKILL), "O": _played_by(0.0)}
    return _Game(protocol, environment, answers, environment())


def _hunt() -> _Game:
    protocol = CoordinationProtocol(
        policies={"a1": "one", "a2": "two", "a3": "three"},
        order=TurnOrder.SIMULTANEOUS,
        turn_s=_TURN_S,
        attempts=2,
        on_death=OnDeath.GO_ON,
        usable_episodes=0.0,
        quorum=2,
    )

    def environment() -> Collect:
        return Collect(agents=3, size=4, items=2, rounds=8)

    skills = {"a1": 0.9, "a2": 0.6, "a3": 0.3}
    answers = {agent: _collected_by(skill) for agent, skill in skills.items()}
    return _Game(protocol, environment, answers, environment())


def _played_by(skill: float) -> Callable[[Request, Random], str]:
    """A player of gomoku, good with this probability; it goes by the last board that it was shown."""

    def answer(request: Request, random: Random) -> str:
        rows = [row for row in request.observation.text.split("\n") if len(row) == _SIZE]
        cells = [row for row in rows if set(row) <= set(".XO")][-_SIZE:]
        if len(cells) < _SIZE:
            return "a1"  # a message was lost
        board = Board.parse("\n".join(cells), _LINE)
        player = PLAYERS["heuristic" if random.random() < skill else "random"]
        return str(player.choose(board, random))

    return answer


def _collected_by(skill: float) -> Callable[[Request, Random], str]:
    """An agent of `collect` that goes towards its first item with this probability, else anywhere."""

    def answer(request: Request, random: Random) -> str:
        own = request.observation.text.split("\n")[-1].partition("|")[0].split()
        if len(own) < 2 or random.random() > skill:
            return random.choice("udlr")
        (row, column), (goal_row, goal_column) = map(int, own[0]), map(int, own[1])
        if row != goal_row:
            return "d" if goal_row > row else "u"
        return "r" if goal_column > column else "l"

    return answer


class _Training:
    """Generations of episodes that are played at the same time, with updates that take a while."""

    def __init__(self, mutant: Mutant, scale: Scale, game: _Game) -> None:
        self.log = EventLog()
        self._scale, self._game = scale, game
        actors = {agent: _Unreliable(answer, scale.seed) for agent, answer in game.answers.items()}
        self._coordinator = mutant.coordinator(game.protocol, actors, self.log)
        versions = {policy: f"{policy}@0" for policy in game.protocol.policies.values()}
        self._phases: PhaseCoordinator = mutant.phases(game.protocol, self, self.log, versions)
        self._published = dict.fromkeys(versions, 0)
        run(self._phases.run(scale.generations))

    def violations(self) -> list[Violation]:
        """What the checker finds."""
        return check(self.log, self._game.protocol, self._game.recomputes)

    async def rollout(
        self, generation: int, versions: Mapping[str, str], deadline: Deadline
    ) -> Sequence[EpisodeResult]:
        """All episodes of a generation."""
        plans = [
            EpisodePlan(
                f"g{generation}-e{number}",
                derive_seed("trial", self._scale.seed, generation, number),
                versions,
                generation,
            )
            for number in range(self._scale.episodes)
        ]
        return await asyncio.gather(
            *(
                self._coordinator.play(plan, _Hanging(self._game.environment(), number % 8 == 5), deadline)
                for number, plan in enumerate(plans)
            )
        )

    async def update(self, policy: str, episodes: Sequence[EpisodeResult], deadline: Deadline) -> None:
        """Nothing is learned, but it takes its time, each policy another."""
        await asyncio.sleep(1 + derive_seed("update", policy) % 100)

    async def refresh(self, policy: str, deadline: Deadline) -> str:
        """The next number."""
        await asyncio.sleep(1 + derive_seed("refresh", policy) % 10)
        self._published[policy] += 1
        return f"{policy}@{self._published[policy]}"


class _Hanging:
    """An environment that, if it hangs, does not come back from its third step in time."""

    def __init__(self, environment: MultiEnvironment, hangs: bool) -> None:
        self._environment = environment
        self._hangs = hangs
        self._steps = 0

    @property
    def agents(self) -> tuple[str, ...]:
        """The environment's."""
        return self._environment.agents

    def reset(self, seed: int) -> Situation:
        """Reset the environment."""
        return self._environment.reset(seed)

    def step(self, actions: Actions) -> Situation:
        """Step the environment."""
        self._steps += 1
        if self._hangs and self._steps == 3:
            raise TimeoutError("step took longer than it may")
        return self._environment.step(actions)


class _Unreliable:
    """An agent that answers after a while; of its attempts a tenth is late, and a tenth crashes.

    At one turn in a hundred its context is full.
    """

    def __init__(self, answer: Callable[[Request, Random], str], seed: int) -> None:
        self._answer = answer
        self._seed = seed

    async def act(self, request: Request) -> Reply:
        """Answer, late or not, or crash."""
        place = (self._seed, request.episode, request.round, request.agent)
        if derive_seed("context", *place) % 100 == 0:
            raise ContextFull("there is no room for an answer")
        mood = Random(derive_seed("mood", *place, request.attempt))
        trouble = mood.random()
        await asyncio.sleep(mood.uniform(0.1, 1) if trouble > 0.1 else _TURN_S + mood.uniform(0.01, 0.1))
        if trouble > 0.9:
            raise RuntimeError("the agent crashed")
        # a retry may well give another answer than the attempt before it
        random = Random(derive_seed("answer", *place, request.attempt))
        return Reply(Action(self._answer(request, random)), request.version)
