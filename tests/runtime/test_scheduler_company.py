"""A batch waits for clients that will be back in a moment, and for nobody else."""

import pytest

from opentinker_core.runtime import company as module
from opentinker_core.runtime.company import Company
from opentinker_core.runtime.operations import Kind
from tests.runtime.executors import Bookkeeper, held, operation

FB, STEP = Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP
P, Q = operation(FB, "p"), operation(FB, "q")


class Clock:
    """The time that the module under test sees, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_who_was_answered_is_waited_for_until_it_is_late(clock: Clock) -> None:
    company = Company(5.0)
    assert company.patience() <= 0
    company.answered([P], [])
    clock.now += 2
    assert company.patience() == 3
    clock.now += 3
    assert company.patience() <= 0


def test_who_came_back_is_not_waited_for(clock: Clock) -> None:
    company = Company(5.0)
    company.answered([P, Q], [])
    company.arrived(P.lane)
    assert company.patience() == 5
    company.arrived(Q.lane)
    assert company.patience() <= 0


def test_a_short_batch_does_not_make_the_others_late(clock: Clock) -> None:
    company = Company(5.0)
    company.answered([P], [])
    clock.now += 1
    company.answered([Q], [])
    company.arrived(Q.lane)
    assert company.patience() == 4


def test_nor_is_who_has_something_waiting(clock: Clock) -> None:
    company = Company(5.0)
    company.answered([P], [P.lane])
    assert company.patience() <= 0


@pytest.mark.parametrize("comes", [True, False])
def test_who_was_late_is_not_waited_for_until_it_comes_back_in_time(clock: Clock, comes: bool) -> None:
    company = Company(5.0)
    company.answered([P], [])
    clock.now += 6
    if comes:
        company.arrived(P.lane)
    company.answered([P], [])
    assert company.patience() <= 0
    clock.now += 1
    company.arrived(P.lane)
    company.answered([P], [])
    assert company.patience() == 5


def test_a_client_may_be_quick_after_one_kind_and_slow_after_another(clock: Clock) -> None:
    company = Company(5.0)
    for _ in range(2):
        company.answered([operation(STEP, "p")], [])
        clock.now += 60
        company.arrived(P.lane)
        company.answered([P], [])
        assert company.patience() == 5
        clock.now += 1
        company.arrived(P.lane)


def test_the_memory_of_slow_clients_is_bounded(clock: Clock) -> None:
    company = Company(5.0)
    for number in range(2 * module._REMEMBERED):
        company.answered([operation(FB, f"p{number}")], [])
        clock.now += 6
    assert len(company._slow) <= module._REMEMBERED
    assert len(company._absent) == 1


def test_a_full_batch_waits_for_nobody() -> None:
    """The client of the plug is not back, and would be waited for if there were room for it."""
    bookkeeper = Bookkeeper()
    with held(bookkeeper, company_seconds=3600.0) as scheduler:
        futures = [scheduler.submit(operation(FB, policy)) for policy in "pqrst"]
        bookkeeper.open.set()
        for future in futures[:4]:
            future.result()
        assert not futures[4].done()
