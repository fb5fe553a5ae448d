"""Broken coordinators are caught from their logs, the right one is never accused; win rates tell little."""

import pytest

from opentinker_core.agents.coordination.mutants import MUTANTS, Mutant
from opentinker_core.agents.coordination.trial import Scale, Verdict, differ, verdict, verdicts


@pytest.fixture(scope="module")
def found() -> dict[str, Verdict]:
    return {one.name: one for one in verdicts(generations=3, episodes=12, seed=1)}


def test_the_right_coordinator_is_not_accused(found: dict[str, Verdict]) -> None:
    assert found["correct"].violations == []
    assert found["correct"].right


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_nor_is_it_with_other_seeds(seed: int) -> None:
    assert verdict(None, Scale(2, 10, seed)).violations == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_one_is_caught_by_the_check_that_must_catch_it(
    mutant: Mutant, found: dict[str, Verdict]
) -> None:
    judged = found[mutant.name]
    assert judged.caught, judged.counts
    assert judged.summary == mutant.summary


def test_the_win_rate_of_two_agents_misses_most(found: dict[str, Verdict]) -> None:
    broken = [one for one in found.values() if one.expected is not None]
    assert len(broken) == len(MUTANTS) >= 10
    assert sum(one.seen_by_win_rate for one in broken) < len(broken) / 2
    assert found["swapped-rewards"].seen_by_win_rate


@pytest.mark.parametrize(
    ("one", "other", "cases", "expected"),
    [(0.9, 0.9, 100, False), (0.9, 0.85, 100, False), (0.9, 0.7, 100, True), (0.9, 0.7, 10, False)],
)
def test_shares_differ_when_chance_hardly_explains_it(
    one: float, other: float, cases: int, expected: bool
) -> None:
    assert differ(one, cases, other, cases) is expected


def test_shares_of_nothing_differ_from_others() -> None:
    assert differ(0.0, 0, 0.5, 10)
    assert not differ(0.0, 0, 0.0, 0)
