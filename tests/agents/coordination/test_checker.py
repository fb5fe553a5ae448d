"""The checker reads the log alone: what is missing from it, or was put into it, shows."""

from dataclasses import replace

import pytest

from envs.collect import Collect
from envs.protocol import Action
from opentinker_core.agents.coordination.actors import Scripted
from opentinker_core.agents.coordination.checker import check
from opentinker_core.agents.coordination.coordinator import Coordinator, EpisodePlan
from opentinker_core.agents.coordination.log import Event, EventLog, Kind
from opentinker_core.agents.coordination.protocol import CoordinationProtocol, TurnOrder
from opentinker_core.agents.coordination.violations import Check
from opentinker_core.agents.coordination.virtual_clock import run

PROTOCOL = CoordinationProtocol(
    policies={"a1": "one", "a2": "two", "a3": "one"}, order=TurnOrder.SIMULTANEOUS
)
GAME = Collect(size=3, items=1, rounds=4)


@pytest.fixture(scope="module")
def events() -> list[Event]:
    log = EventLog()
    letters = {"a1": "d", "a2": "l", "a3": "r"}
    actors = {agent: Scripted(lambda request: letters[request.agent]) for agent in PROTOCOL.agents}
    plan = EpisodePlan("e", 5, {"one": "one@1", "two": "two@1"})
    run(Coordinator(PROTOCOL, actors, log).play(plan, Collect(size=3, items=1, rounds=4)))
    events = list(log)
    assert check(events, PROTOCOL, GAME) == []
    return events


def found(events: list[Event]) -> set[Check]:
    return {violation.check for violation in check(events, PROTOCOL, GAME)}


def test_no_event_can_be_missing(events: list[Event]) -> None:
    for event in events:
        rest = [other for other in events if other is not event]
        assert found(rest), f"{event.kind} of {event.agent or 'all'} was left out"


def test_no_event_can_come_twice(events: list[Event]) -> None:
    for place, event in enumerate(events):
        if event.kind is not Kind.ACTED:  # a second answer to one request is heard by nobody
            assert found([*events[:place], event, *events[place:]]), f"{event.kind} of {event.agent or 'all'}"


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        (Kind.ASKED, {"shown": "23>"}, Check.LOST_MESSAGE),
        (Kind.ACTED, {"text": "u"}, Check.INVENTED),
        (Kind.STEPPED, {"rewards": {"a1": 9.0}}, Check.REWARD),
        (Kind.CREDITED, {"reward": 9.0}, Check.REWARD),
        (Kind.CREDITED, {"reward": None}, Check.REWARD),
        (Kind.CREDITED, {"policy": "three"}, Check.CREDIT),
        (Kind.CREDITED, {"turns": []}, Check.CREDIT),
        (Kind.ENDED, {"reason": "max_rounds"}, Check.END),
        (Kind.ENDED, {"reason": "tired"}, Check.END),
    ],
)
def test_a_changed_event_is_recognized(
    events: list[Event], kind: Kind, change: dict, expected: Check
) -> None:
    place = next(number for number, event in enumerate(events) if event.kind is kind)
    changed = replace(events[place], detail=events[place].detail | change)
    assert expected in found([*events[:place], changed, *events[place + 1 :]])


def test_another_version_is_recognized(events: list[Event]) -> None:
    place = [number for number, event in enumerate(events) if event.kind is Kind.ACTED][-1]
    changed = replace(events[place], version="one@0")
    assert found([*events[:place], changed, *events[place + 1 :]]) == {Check.VERSION}


def test_rewards_are_recomputed_and_not_believed(events: list[Event]) -> None:
    class Generous(Collect):
        """Pays the first agent for nothing."""

        def step(self, actions):
            situation = super().step(actions)
            return replace(situation, rewards={**situation.rewards, "a1": 1.0})

    log = EventLog()
    actors = {agent: Scripted(lambda request: ".") for agent in PROTOCOL.agents}
    plan = EpisodePlan("e", 5, {"one": "one@1", "two": "two@1"})
    run(Coordinator(PROTOCOL, actors, log).play(plan, Generous(size=3, items=1, rounds=4)))
    assert check(log, PROTOCOL) == []
    assert {violation.check for violation in check(log, PROTOCOL, GAME)} == {Check.REWARD}


def test_it_does_not_play(events: list[Event]) -> None:
    class Unplayable:
        def recompute(self, seed, steps):
            return GAME.recompute(seed, steps)

        def step(self, actions: dict[str, Action]):
            raise AssertionError

    assert check(events, PROTOCOL, Unplayable()) == []
