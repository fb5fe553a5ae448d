"""What the coordinator does when all goes well, and when an agent, the environment or the caller does not."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from envs.collect import Collect
from envs.gomoku_match import GomokuMatch
from envs.multi import Actions, MultiEnvironment, Situation
from envs.protocol import Action, Observation
from opentinker_core.agents.coordination.actors import Actor, Deadline, Reply, Request, Scripted
from opentinker_core.agents.coordination.checker import check
from opentinker_core.agents.coordination.coordinator import Coordinator, EpisodePlan, EpisodeResult
from opentinker_core.agents.coordination.log import EpisodeEnd, EventLog, Kind
from opentinker_core.agents.coordination.protocol import CoordinationProtocol, OnDeath, TurnOrder
from opentinker_core.agents.coordination.virtual_clock import DeadlockError, run
from opentinker_core.errors import UsageError
from tests.agents.coordination.games import NAMES, Asking, Talking

ORDERS: dict[type, TurnOrder] = {
    GomokuMatch: TurnOrder.SEQUENTIAL,
    Collect: TurnOrder.SIMULTANEOUS,
    Asking: TurnOrder.CONDITIONAL,
    Talking: TurnOrder.MESSAGES,
}


class Delayed:
    """Answers after so many seconds; crashes where the answer is None."""

    def __init__(self, answer: Callable[[Request], str | None], seconds: float = 0.0) -> None:
        self.answer = answer
        self.seconds = seconds

    async def act(self, request: Request) -> Reply:
        await asyncio.sleep(self.seconds)
        text = self.answer(request)
        if text is None:
            raise RuntimeError("crashed")
        return Reply(Action(text), request.version)


def protocol_of(environment: MultiEnvironment, **changes: Any) -> CoordinationProtocol:
    order = ORDERS[type(environment)]
    return CoordinationProtocol(
        policies={agent: f"policy-{agent}" for agent in environment.agents}, order=order, **changes
    )


def play(
    environment: MultiEnvironment, actors: dict[str, Actor], protocol: CoordinationProtocol, seed: int = 0
) -> tuple[EpisodeResult, EventLog]:
    log = EventLog()
    plan = EpisodePlan("e", seed, {policy: f"{policy}@1" for policy in protocol.policies.values()})
    result = run(Coordinator(protocol, actors, log).play(plan, environment))
    assert check(log, protocol, environment) == []  # type: ignore[arg-type]
    return result, log


def always(text: str, *agents: str) -> dict[str, Actor]:
    return {agent: Scripted(lambda request: text) for agent in agents}


def test_a_turn_carries_what_was_shown_since_the_one_before() -> None:
    environment = GomokuMatch(size=3, line=3, opening=1)
    moves = iter(["a1", "b1", "c1", "a2", "b2", "c2", "a3", "b3", "c3"])
    actors: dict[str, Actor] = dict.fromkeys("XO", Scripted(lambda request: next(moves)))
    result, _ = play(environment, actors, protocol_of(environment), seed=4)
    assert result.end is EpisodeEnd.DONE
    board = environment.reset(4).observations["X"].text
    first, second = result.agents["O"].turns[:2]
    assert first.observation.text == f"{board}\nO:"
    x_turn = result.agents["X"].turns[0]
    assert x_turn.observation.text.startswith(f"{board}\nO:{first.action.text}\n")
    assert second.observation.text.startswith(f"\nX:{x_turn.action.text}\n")


def test_rewards_of_others_rounds_belong_to_the_turn_before() -> None:
    environment = Asking(rounds=8)
    result, log = play(environment, always("yes", *NAMES), protocol_of(environment), seed=2)
    steps = [event.detail for event in log if event.kind is Kind.STEPPED]
    for agent, one in result.agents.items():
        moved = [number for number, step in enumerate(steps) if agent in step["actions"]]
        bounds = [0, *moved[1:], len(steps)]
        earned = [step["rewards"].get(agent, 0.0) for step in steps]
        assert [turn.round for turn in one.turns] == moved
        expected = [sum(earned[bounds[i] : bounds[i + 1]]) for i in range(len(moved))]
        assert [turn.reward for turn in one.turns] == expected
        assert one.reward == sum(expected) > 0


def test_simultaneous_agents_wait_together_not_one_after_another() -> None:
    environment = Collect(rounds=3)
    asked: list[tuple[int, float]] = []

    def answer(request: Request) -> str:
        asked.append((request.round, asyncio.get_running_loop().time()))
        return "."

    actors: dict[str, Actor] = {
        agent: Delayed(answer, seconds) for agent, seconds in zip(environment.agents, (1, 5, 3), strict=True)
    }
    result, _ = play(environment, actors, protocol_of(environment))
    assert result.rounds == 3
    assert max(at for _, at in asked) == pytest.approx(15)


def test_free_messages_are_delivered_as_they_come_or_at_the_barrier() -> None:
    for barrier in (False, True):
        environment = Talking(turns=2)
        actors: dict[str, Actor] = {
            "ann": Delayed(lambda request: "quick", 1.0),
            "bob": Delayed(lambda request: "slow", 1.8),
            "cleo": Delayed(lambda request: "slow", 3.1),
        }
        result, _ = play(environment, actors, protocol_of(environment, turn_barrier=barrier))
        shown = [turn.observation.text for turn in result.agents["ann"].turns]
        assert shown == ["[0]", "bob:slow;cleo:slow;" if barrier else ""]
        assert all(one.reward == 2.0 for one in result.agents.values())


@pytest.mark.parametrize("why", ["crash", "late", "stale"])
def test_a_retry_is_the_same_question_with_another_attempt_id(why: str) -> None:
    environment = GomokuMatch(size=3, line=3)

    class FailsOnce:
        async def act(self, request: Request) -> Reply:
            if request.attempt == 1 and why == "crash":
                raise RuntimeError("crashed")
            if request.attempt == 1 and why == "late":
                await asyncio.sleep(11)
            version = "other@7" if request.attempt == 1 and why == "stale" else request.version
            return Reply(Action("no move"), version)

    protocol = protocol_of(environment, turn_s=10, attempts=2)
    result, log = play(environment, dict.fromkeys("XO", FailsOnce()), protocol)
    first, second = (event for event in log if event.kind is Kind.ASKED)
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.detail == second.detail
    assert result.end is EpisodeEnd.DONE
    assert [turn.attempt for one in result.agents.values() for turn in one.turns] == [2]


def test_the_answer_of_a_dead_attempt_is_ignored() -> None:
    environment = GomokuMatch(size=3, line=3, opening=2)

    class Clinging:
        """Does not let its first attempt be cancelled, which then answers before the second."""

        async def act(self, request: Request) -> Reply:
            try:
                await asyncio.sleep(20 if request.attempt == 1 else 5)
            except asyncio.CancelledError:
                await asyncio.sleep(1)
            return Reply(Action(f"attempt {request.attempt}"), request.version)

    protocol = protocol_of(environment, turn_s=10, attempts=2)
    result, log = play(environment, dict.fromkeys("XO", Clinging()), protocol)
    assert [event.attempt for event in log if event.kind is Kind.ACTED] == [1, 2]
    assert [turn.action.text for turn in result.agents["X"].turns] == ["attempt 2"]


@pytest.mark.parametrize("ticks", range(5))
@pytest.mark.parametrize("barrier", [True, False])
def test_the_last_attempt_is_dead_from_the_moment_of_its_deadline(ticks: int, barrier: bool) -> None:
    class Clinging:
        """Answers some ticks after it was let go of."""

        async def act(self, request: Request) -> Reply:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                for _ in range(ticks):
                    await asyncio.sleep(0)
            return Reply(Action("late"), request.version)

    environment = Talking(turns=2)
    actors: dict[str, Actor] = dict.fromkeys(NAMES, Delayed(lambda request: "hi", 1.0))
    actors["ann"] = Clinging()
    protocol = protocol_of(environment, turn_barrier=barrier, turn_s=2, attempts=1, on_death=OnDeath.GO_ON)
    result, log = play(environment, actors, protocol)
    assert any(event.kind is Kind.ACTED and event.agent == "ann" for event in log)
    assert (result.end, result.agents["ann"].turns) == (EpisodeEnd.DONE, ())


@pytest.mark.parametrize("how", ["crash", "hang"])
@pytest.mark.parametrize("on_death", OnDeath)
def test_a_dead_agents_reward_is_missing_or_forfeit_and_never_zero_by_accident(
    on_death: OnDeath, how: str
) -> None:
    environment = GomokuMatch(rewards="score")
    seconds = 0.0 if how == "crash" else 1e6
    actors: dict[str, Actor] = {"X": Delayed(lambda request: None, seconds), "O": Scripted(lambda _: "a1")}
    result, log = play(environment, actors, protocol_of(environment, on_death=on_death, attempts=3))
    assert result.end is (EpisodeEnd.AGENT_DIED if on_death is OnDeath.END else EpisodeEnd.DONE)
    rewards = {agent: one.reward for agent, one in result.agents.items()}
    assert (
        rewards
        == {
            OnDeath.END: {"X": None, "O": None},
            OnDeath.GO_ON: {"X": None, "O": 1.0},
            OnDeath.FORFEIT: {"X": 0.0, "O": 1.0},
        }[on_death]
    )
    assert result.agents["X"].died.startswith("raised RuntimeError" if how == "crash" else "late")
    assert [event.kind for event in log].count(Kind.GAVE_UP) == 3


@pytest.mark.parametrize("ticks", range(8))
def test_a_failure_at_the_moment_of_anothers_message_is_dealt_with_after_it(ticks: int) -> None:
    class CrashesAtOne:
        async def act(self, request: Request) -> Reply:
            await asyncio.sleep(1.0)
            for _ in range(ticks):
                await asyncio.sleep(0)
            raise RuntimeError("crashed")

    environment = Talking(turns=2)
    actors: dict[str, Actor] = dict.fromkeys(NAMES, Delayed(lambda request: "hi", 1.0))
    actors["ann"] = CrashesAtOne()
    protocol = protocol_of(environment, turn_barrier=False, on_death=OnDeath.GO_ON, attempts=1)
    result, _ = play(environment, actors, protocol)
    assert result.end is EpisodeEnd.DONE
    assert result.agents["ann"].reward is None
    assert result.agents["ann"].died


def test_others_go_on_while_there_is_a_quorum() -> None:
    environment = Collect(rounds=4)
    actors = always(".", "a1", "a2", "a3")
    actors["a2"] = Delayed(lambda request: None if request.round == 1 else ".")
    protocol = protocol_of(environment, on_death=OnDeath.GO_ON, quorum=2)
    result, _ = play(environment, actors, protocol)
    assert (result.end, result.rounds) == (EpisodeEnd.DONE, 4)
    assert [len(one.turns) for one in result.agents.values()] == [4, 1, 4]
    assert result.agents["a2"].reward is None
    assert result.agents["a1"].reward is not None
    result, _ = play(Collect(rounds=4), actors, protocol.model_copy(update={"quorum": 3}))
    assert (result.end, result.rounds) == (EpisodeEnd.QUORUM_LOST, 1)
    assert {one.reward for one in result.agents.values()} == {None}


def test_the_episodes_deadline_goes_before_that_of_a_turn() -> None:
    environment = Collect(rounds=50, items=1)
    actors: dict[str, Actor] = dict.fromkeys(environment.agents, Delayed(lambda request: ".", 3.0))
    seen: list[float] = []

    def slow(request: Request) -> str:
        seen.append(request.deadline.at)
        return "."

    actors["a1"] = Delayed(slow, 3.0)
    result, _ = play(environment, actors, protocol_of(environment, turn_s=10, episode_s=20))
    assert (result.end, result.rounds) == (EpisodeEnd.DEADLINE, 6)
    assert seen == pytest.approx([10, 13, 16, 19, 20, 20])
    assert {one.died for one in result.agents.values()} == {""}


def test_the_deadline_of_the_whole_goes_before_the_episodes() -> None:
    environment = Collect(rounds=50, items=1)
    protocol = protocol_of(environment, turn_s=10, episode_s=100)
    log = EventLog()
    actors: dict[str, Actor] = dict.fromkeys(environment.agents, Delayed(lambda request: ".", 3.0))
    plan = EpisodePlan("e", 0, dict.fromkeys(protocol.policies.values(), "v@1"))

    async def main() -> tuple[EpisodeResult, float]:
        result = await Coordinator(protocol, actors, log).play(plan, environment, Deadline.after(20))
        return result, asyncio.get_running_loop().time()

    result, at = run(main())
    assert (result.end, at) == (EpisodeEnd.DEADLINE, pytest.approx(20))


def test_the_limit_of_rounds_truncates_and_rewards_count() -> None:
    environment = Talking(turns=9)
    protocol = protocol_of(environment, max_rounds=2)
    result, _ = play(environment, always("hi", *NAMES), protocol)
    assert (result.end, result.rounds) == (EpisodeEnd.MAX_ROUNDS, 2)
    assert [one.reward for one in result.agents.values()] == [2.0, 2.0, 2.0]


class Broken(Talking):
    """Does one thing wrong in its second step."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.steps = fault, 0

    def step(self, actions: Actions) -> Situation:
        self.steps += 1
        situation = super().step(actions)
        if self.steps == 2 and self.fault == "raises":
            raise ZeroDivisionError("broken")
        if self.steps == 2 and self.fault == "stranger":
            return Situation(("dora",))
        if self.steps == 2 and self.fault == "stranger told":
            return Situation(NAMES, observations={"dora": Observation.user("hi")})
        if self.steps == 2 and self.fault == "together":
            return Situation(NAMES, together=True)
        return situation


@pytest.mark.parametrize(
    ("fault", "end"),
    [
        ("raises", EpisodeEnd.ENVIRONMENT_FAILED),
        ("stranger", EpisodeEnd.ENVIRONMENT_FAILED),
        ("stranger told", EpisodeEnd.ENVIRONMENT_FAILED),
        ("together", EpisodeEnd.OUT_OF_ORDER),
    ],
)
def test_a_broken_environment_ends_the_episode_and_rewards_are_missing(fault: str, end: EpisodeEnd) -> None:
    environment = Broken(fault)
    protocol = protocol_of(Talking())
    log = EventLog()
    plan = EpisodePlan("e", 0, dict.fromkeys(protocol.policies.values(), "v@1"))
    result = run(Coordinator(protocol, always("hi", *NAMES), log).play(plan, environment))
    assert result.end is end
    assert {one.reward for one in result.agents.values()} == {None}
    assert check(log, protocol) == []


def test_rewards_that_are_no_numbers_end_the_episode() -> None:
    class Infinite(Talking):
        def step(self, actions: Actions) -> Situation:
            return Situation(NAMES, rewards={"ann": float("inf")})

    protocol = protocol_of(Talking())
    log = EventLog()
    plan = EpisodePlan("e", 0, dict.fromkeys(protocol.policies.values(), "v@1"))
    result = run(Coordinator(protocol, always("hi", *NAMES), log).play(plan, Infinite()))
    assert result.end is EpisodeEnd.ENVIRONMENT_FAILED
    assert check(log, protocol) == []


def test_cancelling_leaves_an_end_in_the_log_and_goes_on() -> None:
    environment = Collect()
    protocol = protocol_of(environment)
    log = EventLog()
    actors: dict[str, Actor] = dict.fromkeys(environment.agents, Delayed(lambda request: ".", 5.0))
    plan = EpisodePlan("e", 0, dict.fromkeys(protocol.policies.values(), "v@1"))

    async def main() -> None:
        task = asyncio.create_task(Coordinator(protocol, actors, log).play(plan, environment))
        await asyncio.sleep(7)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    assert list(log)[-1].detail == {"reason": "cancelled"}
    assert check(log, protocol, environment) == []


def test_what_does_not_fit_together_is_refused_before_anything_is_played() -> None:
    log = EventLog()
    protocol = protocol_of(GomokuMatch())
    with pytest.raises(UsageError, match=r"^actors: agents X; accepted: X, O$"):
        Coordinator(protocol, always("a1", "X"), log)
    coordinator = Coordinator(protocol, always("a1", "X", "O"), log)
    with pytest.raises(UsageError, match=r"^environment: agents a1, a2, a3; accepted: X, O$"):
        run(coordinator.play(EpisodePlan("e", 0, {}), Collect()))
    with pytest.raises(UsageError, match=r"^versions: policy 'policy-O' has none"):
        run(coordinator.play(EpisodePlan("e", 0, {"policy-X": "v"}), GomokuMatch()))
    assert len(log) == 0


def test_a_deadlock_is_found_on_the_virtual_clock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError):
        run(main())
