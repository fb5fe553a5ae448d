import json

import pytest

from envs.conformance import assert_conforms, check_environment
from envs.playing import Check
from envs.protocol import Environment
from tests.envs import broken

# what the fault must be reported as; more may follow from it
FAULTS = {
    broken.RaisesOnText: Check.PLAYS,
    broken.ReturnsATuple: Check.TYPES,
    broken.ObservationOfText: Check.TYPES,
    broken.UnknownRole: Check.TYPES,
    broken.RewardIsText: Check.TYPES,
    broken.DoneIsANumber: Check.TYPES,
    broken.InfiniteReward: Check.REWARDS,
    broken.InfoIsNotJson: Check.INFO,
    broken.InfoHasNaN: Check.INFO,
    broken.InfoHasNumbersAsKeys: Check.INFO,
    broken.NeverEnds: Check.ENDS,
    broken.StepsBeforeReset: Check.ORDER,
    broken.StepsAfterTheEnd: Check.ORDER,
    broken.RefusesWithAnotherError: Check.ORDER,
    broken.CountsItsEpisodes: Check.SAME_INSTANCE,
    broken.KeepsALeftover: Check.SAME_INSTANCE,
    broken.DiffersByInstance: Check.FRESH_INSTANCE,
    broken.SharesItsState: Check.ISOLATION,
    broken.SplitsOverlap: Check.SPLITS,
    broken.DemonstratesWrongly: Check.DEMONSTRATION,
    broken.DemonstratesDifferently: Check.DEMONSTRATION,
    broken.SeedsTheGlobalGenerator: Check.GLOBAL_RANDOM,
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_is_caught_and_named(fault: type[Environment]) -> None:
    report = check_environment(fault, new_process=False)
    assert FAULTS[fault] in [violation.check for violation in report.violations]


def test_a_fault_that_stands_alone_is_reported_alone() -> None:
    for fault in (broken.SharesItsState, broken.SplitsOverlap, broken.SeedsTheGlobalGenerator):
        report = check_environment(fault, new_process=False)
        assert [violation.check for violation in report.violations] == [FAULTS[fault]]


def test_dependence_on_the_hash_seed_is_caught_in_a_new_process() -> None:
    report = check_environment(broken.DiffersByHashSeed)
    assert [violation.check for violation in report.violations] == [Check.NEW_PROCESS]


def test_a_right_environment_passes_every_check() -> None:
    report = check_environment(broken.Right)
    assert report.ok
    assert set(report.passed) == set(Check)


def test_endless_episodes_are_accepted_when_declared() -> None:
    report = check_environment(broken.NeverEndsAndSaysSo, new_process=False)
    assert Check.ENDS in report.skipped
    assert Check.ENDS not in [violation.check for violation in report.violations]


def test_what_cannot_be_imported_skips_the_new_process_and_says_so() -> None:
    class Local(broken.Right):
        pass

    report = check_environment(Local)
    assert report.ok
    assert "imported" in report.skipped[Check.NEW_PROCESS]


def test_the_assertion_names_environment_check_and_detail() -> None:
    with pytest.raises(AssertionError, match=r"InfoHasNaN: does not conform\n  info: .*JSON compliant"):
        assert_conforms(broken.InfoHasNaN, new_process=False)


def test_a_report_is_json() -> None:
    report = check_environment(broken.NeverEnds, new_process=False)
    assert json.loads(json.dumps(report.as_dict()))["violations"][0]["check"] == "ends"


@pytest.mark.parametrize(
    ("id", "args"),
    [
        ("arithmetic", {}),
        ("arithmetic", {"operations": "+-*", "digits": 3, "shots": 3, "attempts": 3, "partial_credit": 0.1}),
        ("reasoning_gym/leg_counting", {}),
        ("reasoning_gym/countdown", {"min_numbers": 3, "max_numbers": 3, "extract": "tag", "partial": False}),
        ("reasoning_gym/isomorphic_strings", {"extract": "last_line"}),
        ("reasoning_gym/rush_hour", {}),
    ],
)
def test_shipped_environments_conform(id: str, args: dict) -> None:
    assert_conforms(id, args, seeds=4)
