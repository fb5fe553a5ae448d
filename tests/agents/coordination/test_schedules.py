"""Random schedules on a virtual clock: agents crash, hang, are late, stale or cancelled, their context is
full, environments take their time or hang; and episodes are cancelled.

Whatever happens: no dead-lock, no double move, every episode ends once, with a reason, in time.
`OPENTINKER_SCHEDULES` says how many schedules are tried.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from envs.collect import Collect
from envs.gomoku_match import GomokuMatch
from envs.protocol import Action
from opentinker_core.agents.coordination.actors import ContextFull, Reply, Request
from opentinker_core.agents.coordination.checker import check
from opentinker_core.agents.coordination.coordinator import Coordinator, EpisodePlan, EpisodeResult
from opentinker_core.agents.coordination.log import EpisodeEnd, EventLog, Kind
from opentinker_core.agents.coordination.protocol import CoordinationProtocol, OnDeath, TurnOrder
from opentinker_core.agents.coordination.virtual_clock import run
from opentinker_core.agents.coordination.witness import Caller, at_once
from tests.agents.coordination.games import NAMES, Asking, Talking

SCHEDULES = int(os.environ.get("OPENTINKER_SCHEDULES", "500"))
TURN_S = 4.0

GAMES: Mapping[str, tuple[Callable[[], Any], TurnOrder, tuple[str, ...]]] = {
    "match": (lambda: GomokuMatch(size=3, line=3), TurnOrder.SEQUENTIAL, ("X", "O")),
    "collect": (lambda: Collect(size=3, items=1, rounds=4), TurnOrder.SIMULTANEOUS, ("a1", "a2", "a3")),
    "asking": (Asking, TurnOrder.CONDITIONAL, NAMES),
    "talking": (Talking, TurnOrder.MESSAGES, NAMES),
}
WORDS = ("yes", "no", "a1", "b2", "c3", "a3", "u", "d", "l", "r")


@dataclass
class Moody:
    """Does what the seed says at each attempt; `trouble`: how often that is no answer in time."""

    seed: int
    trouble: float

    async def act(self, request: Request) -> Reply:
        random = Random(f"{self.seed} {request.episode} {request.round} {request.agent} {request.attempt}")
        reply = Reply(Action(random.choice(WORDS)), request.version)
        if random.random() < self.trouble:
            return await self._fail(random, reply)
        for _ in range(random.choice((0, 0, 1, 3))):
            await asyncio.sleep(0)
        if random.random() < 0.5:
            await asyncio.sleep(random.choice((0.5, 1.0, 1.5, TURN_S - 0.1)))
        return reply

    async def _fail(self, random: Random, reply: Reply) -> Any:
        await asyncio.sleep(random.choice((0.0, 0.0, 1.0, TURN_S)))
        match random.choice(("crash", "late", "hang", "cling", "stale", "give up", "nonsense", "full")):
            case "crash":
                raise RuntimeError("crashed")
            case "full":
                raise ContextFull("no room")
            case "late":
                await asyncio.sleep(random.choice((TURN_S, TURN_S + 0.1, 3 * TURN_S)))
            case "hang":
                await asyncio.Event().wait()
            case "cling":  # does not let itself be cancelled, and answers later
                try:
                    await asyncio.sleep(10 * TURN_S)
                except asyncio.CancelledError:
                    await asyncio.sleep(random.choice((0.5, 2.0)))
                if random.random() < 0.3:
                    raise ContextFull("no room, and too late")
            case "stale":
                return Reply(reply.action, "old@0")
            case "give up":
                raise asyncio.CancelledError
            case "nonsense":
                return None
        return reply


@dataclass
class Slow:
    """Calls environments as threads do: others go on meanwhile, and some calls end by their limit."""

    seed: int
    hangs: float
    calls: int = 0

    async def __call__(self, method: Callable[[Any], Any], argument: Any) -> Any:
        self.calls += 1
        random = Random(f"{self.seed} {self.calls}")
        if random.random() < self.hangs:
            await asyncio.sleep(2 * TURN_S)
            raise TimeoutError("it took too long")
        for _ in range(random.choice((0, 1, 2, 5))):
            await asyncio.sleep(0)
        await asyncio.sleep(random.choice((0.0, 0.5, 1.0, TURN_S, TURN_S + 1)))
        return method(argument)


@st.composite
def protocols(draw: st.DrawFn, order: TurnOrder, agents: tuple[str, ...]) -> CoordinationProtocol:
    return CoordinationProtocol(
        policies={agent: draw(st.sampled_from(("one", "two"))) for agent in agents},
        order=order,
        turn_barrier=order is not TurnOrder.MESSAGES or draw(st.booleans()),
        turn_s=TURN_S,
        episode_s=draw(st.sampled_from((TURN_S, 3 * TURN_S, 10 * TURN_S, 1000.0))),
        max_rounds=draw(st.sampled_from((2, 5, 1000))),
        attempts=draw(st.integers(1, 3)),
        on_death=draw(st.sampled_from(OnDeath)),
        quorum=draw(st.integers(1, len(agents))),
    )


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, CoordinationProtocol, Moody, Caller, list[float | None]]:
    """A game, its protocol, its agents, how it is called, and when each of its episodes is cancelled."""
    game = draw(st.sampled_from(sorted(GAMES)))
    protocol = draw(protocols(*GAMES[game][1:]))
    actor = Moody(draw(st.integers(0, 2**32)), draw(st.sampled_from((0.0, 0.1, 0.3, 0.9))))
    cancelled = st.none() | st.sampled_from((0.0, 0.5, 1.0, TURN_S, 7.3))
    slow = st.builds(Slow, st.integers(0, 2**32), st.sampled_from((0.0, 0.0, 0.1)))
    caller = draw(st.just(at_once) | slow)
    return game, protocol, actor, caller, draw(st.lists(cancelled, min_size=1, max_size=3))


@settings(max_examples=SCHEDULES)
@given(schedules())
def test_every_schedule_ends_with_a_reason_and_nothing_is_wrong_on_the_way(
    schedule: tuple[str, CoordinationProtocol, Moody, Caller, list[float | None]],
) -> None:
    game, protocol, actor, caller, cancelled = schedule
    log = EventLog()
    coordinator = Coordinator(protocol, dict.fromkeys(protocol.agents, actor), log, caller)

    async def play(number: int) -> EpisodeResult:
        plan = EpisodePlan(f"e{number}", actor.seed + number, {"one": "one@1", "two": "two@1"})
        try:
            return await coordinator.play(plan, GAMES[game][0]())
        finally:
            assert asyncio.get_running_loop().time() <= protocol.episode_s + 1e-3

    async def episode(number: int, cancelled_at: float | None) -> EpisodeResult | None:
        task = asyncio.create_task(play(number))
        if cancelled_at is not None:
            await asyncio.sleep(cancelled_at)
            task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(result, BaseException):
            assert isinstance(result, asyncio.CancelledError), result
            result = None
        return result

    async def main() -> list[EpisodeResult | None]:
        return await asyncio.gather(*(episode(*item) for item in enumerate(cancelled)))

    outcomes = run(main())

    assert check(log, protocol, GAMES[game][0]()) == []
    ends = {event.episode: EpisodeEnd(event.detail["reason"]) for event in log if event.kind is Kind.ENDED}
    for number, result in enumerate(outcomes):
        never_began = result is None and f"e{number}" not in ends
        assert never_began or f"e{number}" in ends
        if never_began:
            assert not any(event.episode == f"e{number}" for event in log)
        elif result is None:
            assert ends[f"e{number}"] is EpisodeEnd.CANCELLED
        else:
            assert result.end is ends[f"e{number}"]
            assert all((one.reward is None) >= (not result.end.counts) for one in result.agents.values())
    assert EventLog.read(log.lines()).digest == log.digest
