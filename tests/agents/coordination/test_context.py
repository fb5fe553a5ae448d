"""An agent's context is full: what the coordinator makes of it, and what the checker does not let pass."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from envs.collect import Collect
from envs.multi import MultiEnvironment, Situation
from envs.protocol import Action, Observation
from opentinker_core.agents.coordination.actors import Actor, ContextFull, Reply, Request, Scripted
from opentinker_core.agents.coordination.checker import check
from opentinker_core.agents.coordination.coordinator import (
    AgentTurn,
    Coordinator,
    Ended,
    EpisodePlan,
    EpisodeResult,
    Outcome,
    Running,
)
from opentinker_core.agents.coordination.log import EpisodeEnd, Event, EventLog, Kind
from opentinker_core.agents.coordination.protocol import CoordinationProtocol, OnDeath, TurnOrder
from opentinker_core.agents.coordination.violations import Check
from opentinker_core.agents.coordination.virtual_clock import run
from opentinker_core.agents.coordination.witness import Caller, at_once
from opentinker_core.errors import UsageError
from tests.agents.coordination.games import NAMES, Talking

HUNT = CoordinationProtocol(
    policies={"a1": "one", "a2": "two", "a3": "three"}, order=TurnOrder.SIMULTANEOUS, attempts=1
)
TALK = CoordinationProtocol(
    policies={name: name for name in NAMES}, order=TurnOrder.MESSAGES, turn_barrier=False, attempts=1
)


class Acting:
    """Does at each turn what its function does, after so many seconds."""

    def __init__(self, act: Callable[[Request], str], seconds: float = 0.0) -> None:
        self._act, self._seconds = act, seconds

    async def act(self, request: Request) -> Reply:
        await asyncio.sleep(self._seconds)
        return Reply(Action(self._act(request)), request.version)


def full_at(round_: int) -> Callable[[Request], str]:
    def act(request: Request) -> str:
        if request.round >= round_:
            raise ContextFull("no room")
        return "."

    return act


def crash(request: Request) -> str:
    raise RuntimeError("crashed")


def play(
    protocol: CoordinationProtocol,
    actors: Mapping[str, Actor],
    environment: MultiEnvironment,
    coordinator: type[Coordinator] = Coordinator,
    caller: Caller = at_once,
) -> tuple[EpisodeResult, EventLog]:
    log = EventLog()
    plan = EpisodePlan("e", 1, {policy: f"{policy}@1" for policy in protocol.policies.values()})
    return run(coordinator(protocol, actors, log, caller).play(plan, environment)), log


def hunters(**others: Actor) -> dict[str, Actor]:
    return {agent: Scripted(lambda request: ".") for agent in HUNT.agents} | others


@pytest.mark.parametrize("full", ["a1", "a3"])
@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"on_death": OnDeath.END}, EpisodeEnd.AGENT_DIED),
        ({"on_death": OnDeath.GO_ON, "quorum": 3}, EpisodeEnd.QUORUM_LOST),
        ({"on_death": OnDeath.GO_ON}, EpisodeEnd.CONTEXT),
    ],
)
def test_an_end_without_rewards_goes_before_a_full_context_of_the_same_moment(
    full: str, changes: dict[str, Any], end: EpisodeEnd
) -> None:
    protocol = HUNT.model_copy(update=changes)
    result, log = play(protocol, hunters(**{full: Acting(full_at(0)), "a2": Acting(crash)}), Collect())
    assert result.end is end
    assert check(log, protocol) == []


@pytest.mark.parametrize("other", ["a1", "a3"])
def test_bad_usage_goes_before_all_else(other: str) -> None:
    def refuse(request: Request) -> str:
        raise UsageError("a prompt does not fit")

    actors = hunters(**{other: Acting(full_at(0)), "a2": Acting(refuse)})
    with pytest.raises(UsageError, match="does not fit"):
        play(HUNT, actors, Collect())


@pytest.mark.parametrize("on_death", [OnDeath.END, OnDeath.GO_ON])
def test_a_full_context_truncates_and_rewards_count(on_death: OnDeath) -> None:
    protocol = HUNT.model_copy(update={"on_death": on_death})
    result, log = play(protocol, hunters(a2=Acting(full_at(2))), Collect(rounds=5))
    assert (result.end, result.rounds) == (EpisodeEnd.CONTEXT, 2)
    assert all(one.reward is not None and not one.died for one in result.agents.values())
    assert check(log, protocol) == []


def test_with_forfeit_an_agent_whose_context_is_full_leaves_and_others_go_on() -> None:
    protocol = HUNT.model_copy(update={"on_death": OnDeath.FORFEIT, "attempts": 3})
    result, log = play(protocol, hunters(a2=Acting(full_at(2))), Collect(rounds=5))
    assert (result.end, result.rounds) == (EpisodeEnd.DONE, 5)
    assert {agent: one.died for agent, one in result.agents.items()} == {"a1": "", "a2": "context", "a3": ""}
    assert result.agents["a2"].reward is not None
    assert [event.detail["why"] for event in log if event.kind is Kind.DIED] == ["context"]
    assert check(log, protocol) == []


def test_with_forfeit_a_lone_agent_is_truncated_all_the_same() -> None:
    class Solitaire(Talking):
        agents = ("ann",)  # type: ignore[assignment]

        def reset(self, seed: int) -> Situation:
            return Situation(("ann",), observations={"ann": Observation.user("?")})

        def step(self, actions: Any) -> Situation:
            return Situation(("ann",), rewards={"ann": 1.0})

    protocol = CoordinationProtocol(
        policies={"ann": "one"}, order=TurnOrder.SEQUENTIAL, on_death=OnDeath.FORFEIT
    )
    result, log = play(protocol, {"ann": Acting(full_at(2))}, Solitaire())
    assert (result.end, result.agents["ann"].reward) == (EpisodeEnd.CONTEXT, 2.0)
    assert check(log, protocol) == []


async def slowly(method: Callable[[Any], Situation], argument: Any) -> Situation:
    """An environment that takes two seconds for everything."""
    await asyncio.sleep(2)
    return method(argument)


def test_what_comes_of_a_turn_while_the_environment_is_busy_is_decided_on_after_its_step() -> None:
    for trouble in (full_at(0), crash):
        for on_death in OnDeath:
            protocol = TALK.model_copy(update={"on_death": on_death})
            actors: dict[str, Actor] = dict.fromkeys(NAMES, Acting(lambda request: "hi"))
            actors["cleo"] = Acting(trouble, 1.0)
            result, log = play(protocol, actors, Talking(), caller=slowly)
            if trouble is crash and on_death is OnDeath.END:
                assert result.end is EpisodeEnd.AGENT_DIED
            elif trouble is crash or on_death is OnDeath.FORFEIT:
                assert (result.end, bool(result.agents["cleo"].died)) == (EpisodeEnd.DONE, True)
            else:
                assert result.end is EpisodeEnd.CONTEXT
            assert check(log, protocol) == []


def test_a_step_that_lasts_beyond_the_episodes_deadline_ends_it_there() -> None:
    async def forever(method: Callable[[Any], Situation], argument: Any) -> Situation:
        if method.__name__ == "step":
            await asyncio.sleep(1e6)
        return method(argument)

    async def timed() -> tuple[EpisodeResult, float]:
        log = EventLog()
        plan = EpisodePlan("e", 1, {policy: f"{policy}@1" for policy in HUNT.policies.values()})
        result = await Coordinator(HUNT, hunters(), log, forever).play(plan, Collect())
        assert check(log, HUNT) == []
        return result, asyncio.get_running_loop().time()

    result, at = run(timed())
    assert (result.end, at) == (EpisodeEnd.DEADLINE, pytest.approx(HUNT.episode_s))


def test_a_dead_attempt_that_says_so_later_changes_nothing() -> None:
    class Clinging:
        """Is late, and when it is let go of says that its context was full; its second attempt answers."""

        async def act(self, request: Request) -> Reply:
            try:
                await asyncio.sleep(2 * protocol.turn_s if request.attempt == 1 else 5)
            except asyncio.CancelledError:
                await asyncio.sleep(1)
                raise ContextFull("no room") from None
            return Reply(Action("."), request.version)

    protocol = HUNT.model_copy(update={"turn_s": 10.0, "attempts": 2})
    result, log = play(protocol, hunters(a2=Clinging()), Collect(rounds=1))
    assert any(event.kind is Kind.RAISED and event.detail["full"] for event in log)
    assert result.end is EpisodeEnd.DONE
    assert check(log, protocol) == []
    claimed = [
        replace(event, detail={"reason": "context"}) if event.kind is Kind.ENDED else event for event in log
    ]
    assert Check.END in {violation.check for violation in check(claimed, protocol)}


def test_an_error_of_a_similar_name_is_no_full_context() -> None:
    class ContextFullyLostError(RuntimeError):
        pass

    def lose(request: Request) -> str:
        raise ContextFullyLostError

    result, log = play(HUNT, hunters(a2=Acting(lose)), Collect())
    assert result.end is EpisodeEnd.AGENT_DIED
    assert [event.detail["full"] for event in log if event.kind is Kind.RAISED] == [False]
    assert check(log, HUNT) == []


# what a coordinator might make of it


def reasons(protocol: CoordinationProtocol, log: EventLog | list[Event]) -> set[Check]:
    return {violation.check for violation in check(log, protocol)}


@pytest.mark.parametrize("claimed", ["deadline", "out_of_order", "max_rounds", "done", "environment_failed"])
def test_a_full_context_is_not_given_out_for_something_else(claimed: str) -> None:
    for seconds in (0.0, 1.0):  # others have answered, or are still waited for and let go of
        actors = hunters(a2=Acting(full_at(2), 0.5), a1=Acting(lambda request: ".", seconds))
        _, log = play(HUNT, actors, Collect(rounds=5))
        changed = [
            replace(event, detail={"reason": claimed}) if event.kind is Kind.ENDED else event for event in log
        ]
        assert Check.END in reasons(HUNT, changed)


class Relenting(Coordinator):
    """Lets go of the turn of a full agent, and says that the time was over."""

    def _decide(self, run: Running, outcome: Outcome) -> AgentTurn | None:
        if outcome.full:
            self._note(Kind.GAVE_UP, run, outcome.request, {"why": "cancelled"})
            raise Ended(EpisodeEnd.DEADLINE)
        return super()._decide(run, outcome)


def test_nor_after_its_turn_was_declared_void() -> None:
    _, log = play(HUNT, hunters(a2=Acting(full_at(2))), Collect(rounds=5), Relenting)
    assert Check.END in reasons(HUNT, log)


class Silencing(Coordinator):
    """Leaves an agent whose context is full to itself, while the others go on."""

    said = False

    async def _gather(self, run: Running) -> dict[str, AgentTurn | None]:
        taken: dict[str, AgentTurn | None] = {}
        lost = run.__dict__.setdefault("lost", set())
        for agent in run.situation.to_act:
            if agent not in lost:
                outcome = await self._ask(run, agent)
                if outcome.full:
                    lost.add(agent)
                    if self.said:
                        self._note(Kind.GAVE_UP, run, outcome.request, {"why": "cancelled"})
                else:
                    return {agent: self._decide(run, outcome)}
        return taken


class SilencingAloud(Silencing):
    """As well, and says that its turn was let go of."""

    said = True


@pytest.mark.parametrize("coordinator", [Silencing, SilencingAloud])
def test_a_full_agent_is_not_passed_over_among_free_messages(coordinator: type[Coordinator]) -> None:
    class Chatting(Talking):
        """Ends when the others have nothing more to say."""

        def step(self, actions: Any) -> Situation:
            situation = super().step(actions)
            over = not set(situation.to_act) - {"ann"}
            return replace(situation, to_act=()) if over else situation

    actors: dict[str, Actor] = dict.fromkeys(NAMES, Acting(lambda request: "hi"))
    actors["ann"] = Acting(full_at(0))
    result, log = play(TALK, actors, Chatting(), coordinator)
    assert (result.end, result.rounds) == (EpisodeEnd.DONE, 6)
    assert Check.DEATH in reasons(TALK, log)


def test_one_that_leaves_without_need_is_not_believed() -> None:
    class Ousting(Coordinator):
        """Calls a crash a full context."""

        def _decide(self, run: Running, outcome: Outcome) -> AgentTurn | None:
            return super()._decide(run, replace(outcome, why="context") if outcome.why else outcome)

    protocol = HUNT.model_copy(update={"on_death": OnDeath.FORFEIT})
    _, log = play(protocol, hunters(a2=Acting(crash)), Collect(rounds=3), Ousting)
    assert Check.DEATH in reasons(protocol, log)


def test_nothing_is_played_after_the_environment_failed() -> None:
    calls: list[str] = []

    async def failing(method: Callable[[Any], Situation], argument: Any) -> Situation:
        calls.append(method.__name__)
        if len(calls) == 3:
            raise TimeoutError("step took longer than 60 s")
        return method(argument)

    class Again(Coordinator):
        async def _step(self, run: Running, taken: Mapping[str, AgentTurn | None]) -> None:
            step: Callable[[], Awaitable[None]] = lambda: super(Again, self)._step(run, taken)  # noqa: E731
            try:
                await step()
            except Ended:
                await step()

    result, log = play(HUNT, hunters(), Collect(rounds=5), caller=failing)
    assert (result.end, result.rounds) == (EpisodeEnd.ENVIRONMENT_FAILED, 1)
    assert result.error == "TimeoutError: step took longer than 60 s"
    assert check(log, HUNT) == []
    calls.clear()
    result, log = play(HUNT, hunters(), Collect(rounds=5), Again, failing)
    assert result.end is EpisodeEnd.DONE
    assert reasons(HUNT, log) == {Check.END}
