"""Barriers between rollout, update and refresh over all policies, and what follows where one breaks."""

import asyncio
from collections.abc import Mapping, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.gomoku_match import GomokuMatch
from opentinker_core.agents.coordination.actors import Deadline, Reply, Request, Scripted
from opentinker_core.agents.coordination.checker import check
from opentinker_core.agents.coordination.coordinator import Coordinator, EpisodePlan, EpisodeResult
from opentinker_core.agents.coordination.log import EventLog, Kind
from opentinker_core.agents.coordination.phases import PhaseCoordinator, PhaseError
from opentinker_core.agents.coordination.protocol import (
    CoordinationProtocol,
    Phase,
    PhaseDeadlines,
    TurnOrder,
)
from opentinker_core.agents.coordination.virtual_clock import run
from opentinker_core.errors import UsageError

PROTOCOL = CoordinationProtocol(
    policies={"X": "one", "O": "two"},
    order=TurnOrder.SEQUENTIAL,
    attempts=1,
    phase_s=PhaseDeadlines(rollout=100, update=100, refresh=100),
)
START = {"one": "one@0", "two": "two@0"}


class Training:
    """Two episodes a generation; `delays` and `failing` by (phase, policy)."""

    def __init__(self, protocol: CoordinationProtocol = PROTOCOL) -> None:
        self.protocol = protocol
        self.log = EventLog()
        self.delays: dict[tuple[str, str], float] = {}
        self.failing: set[tuple[str, str]] = set()
        self.answer = "no move"
        self.seen: list[dict[str, str]] = []
        actors = dict.fromkeys(protocol.agents, Scripted(lambda request: self.answer))
        self.coordinator = Coordinator(protocol, actors, self.log)

    async def rollout(
        self, generation: int, versions: Mapping[str, str], deadline: Deadline
    ) -> Sequence[EpisodeResult]:
        self.seen.append(dict(versions))
        await self._work("rollout", "")
        plans = [EpisodePlan(f"{generation}-{i}", i, versions, generation) for i in range(2)]
        return await asyncio.gather(*(self.coordinator.play(plan, GomokuMatch(), deadline) for plan in plans))

    async def update(self, policy: str, episodes: Sequence[EpisodeResult], deadline: Deadline) -> None:
        assert len(episodes) == 2
        await self._work("update", policy)

    async def refresh(self, policy: str, deadline: Deadline) -> str:
        await self._work("refresh", policy)
        return f"{policy}@{len(self.seen)}"

    async def _work(self, phase: str, policy: str) -> None:
        await asyncio.sleep(self.delays.get((phase, policy), 0.0))
        if (phase, policy) in self.failing:
            raise RuntimeError("no memory")

    def train(self, generations: int) -> PhaseCoordinator:
        phases = PhaseCoordinator(self.protocol, self, self.log, START)
        run(phases.run(generations))
        return phases

    def marks(self) -> list[str]:
        """What began and ended, in order."""
        kinds = {Kind.PHASE_BEGAN: "(", Kind.PHASE_ENDED: ")"}
        return [
            f"{event.detail['phase']}{kinds[event.kind]}{event.detail['policy']}"
            for event in self.log
            if event.kind in kinds and event.generation >= 0
        ]


def test_each_generation_samples_from_what_the_one_before_published() -> None:
    training = Training()
    phases = training.train(3)
    assert training.seen == [{"one": f"one@{n}", "two": f"two@{n}"} for n in range(3)]
    assert phases.generation == 3
    assert phases.versions == {"one": "one@3", "two": "two@3"}
    asked = [(event.generation, event.version) for event in training.log if event.kind is Kind.ASKED]
    assert all(version.endswith(f"@{generation}") for generation, version in asked)
    assert check(training.log, PROTOCOL, GomokuMatch()) == []


def test_everybody_waits_for_the_slowest() -> None:
    training = Training()
    training.delays = {("update", "one"): 1, ("update", "two"): 50, ("refresh", "two"): 10}
    training.train(1)
    assert training.marks() == [
        *("rollout(", "rollout)", "update(one", "update(two", "update)one", "update)two"),
        *("refresh(one", "refresh(two", "refresh)one", "refresh)two"),
    ]


@given(st.integers(0, 2**32))
def test_whatever_takes_how_long_the_barriers_hold(seed: int) -> None:
    random = Random(seed)
    training = Training()
    names = [("rollout", ""), *((phase, name) for phase in ("update", "refresh") for name in START)]
    training.delays = {name: random.choice((0, 0.5, 1, 99)) for name in names}
    training.train(2)
    assert check(training.log, PROTOCOL, GomokuMatch()) == []


@pytest.mark.parametrize(("phase", "policy"), [("rollout", ""), ("update", "two"), ("refresh", "one")])
@pytest.mark.parametrize("how", ["fails", "late"])
def test_where_one_does_not_get_through_none_goes_on(phase: str, policy: str, how: str) -> None:
    training = Training()
    if how == "late":
        training.delays = {(phase, policy): 101}
    else:
        training.failing = {(phase, policy)}
    phases = PhaseCoordinator(PROTOCOL, training, training.log, START)
    with pytest.raises(PhaseError) as failed:
        run(phases.run(2))
    why = "not done by its deadline" if how == "late" else "RuntimeError: no memory"
    whose = f" of {policy}" if policy else ""
    assert str(failed.value) == f"{phase}{whose} in generation 0: {why}"
    assert failed.value.phase == phase
    assert phases.generation == 0
    assert phases.versions == START
    assert not any(mark.startswith(later) for mark in training.marks() for later in _after(phase))


def _after(phase: str) -> list[str]:
    phases = [str(one) for one in Phase]
    return [f"{one}(" for one in phases[phases.index(phase) + 1 :]]


def test_no_update_where_too_few_episodes_have_rewards() -> None:
    class Crashing:
        async def act(self, request: Request) -> Reply:
            if request.episode != "0-1":
                raise RuntimeError("crashed")
            return await Scripted(lambda request: "no move").act(request)

    for share, passes in ((0.5, True), (0.6, False)):
        training = Training(PROTOCOL.model_copy(update={"usable_episodes": share}))
        training.coordinator = Coordinator(PROTOCOL, dict.fromkeys("XO", Crashing()), training.log)
        if passes:
            training.train(1)
        else:
            with pytest.raises(
                PhaseError, match=r"^rollout in generation 0: only 1 of 2 episodes have rewards$"
            ):
                training.train(1)


def test_frozen_policies_keep_their_version() -> None:
    protocol = PROTOCOL.model_copy(update={"frozen": ("two",)})
    training = Training(protocol)
    assert training.train(2).versions == {"one": "one@2", "two": "two@0"}
    assert check(training.log, protocol, GomokuMatch()) == []


def test_every_policy_needs_a_version() -> None:
    with pytest.raises(UsageError, match=r"^versions: policy 'two' has none; accepted: one a policy$"):
        PhaseCoordinator(PROTOCOL, Training(), EventLog(), {"one": "one@0"})
