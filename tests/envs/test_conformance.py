import gc
import json
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import pytest

from envs.conformance import assert_conforms, check_environment
from envs.playing import Check
from envs.protocol import Environment, Split
from opentinker_core.agents.tools.calculator import Calculator
from opentinker_core.agents.tools.protocol import Deadline
from tests.envs import broken

# what the fault must be reported as; more may follow from it
FAULTS = {
    broken.RaisesOnText: Check.PLAYS,
    broken.ReturnsATuple: Check.TYPES,
    broken.ObservationOfText: Check.TYPES,
    broken.FirstObservationIsEmpty: Check.TYPES,
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
    broken.BoundToItsThread: Check.THREADS,
    broken.SplitsOverlap: Check.SPLITS,
    broken.DemonstratesWrongly: Check.DEMONSTRATION,
    broken.DemonstratesDifferently: Check.DEMONSTRATION,
    broken.SeedsTheGlobalGenerator: Check.GLOBAL_RANDOM,
    broken.HasNoClose: Check.TEARDOWN,
    broken.ClosesOnce: Check.TEARDOWN,
}
SEVERAL = {Check.ACTION_ORDER, Check.REFUSAL, Check.LEAVING, Check.RECOMPUTE}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_is_caught_and_named(fault: type[Environment]) -> None:
    report = check_environment(fault, new_process=False)
    assert FAULTS[fault] in [violation.check for violation in report.violations]


def test_a_fault_that_stands_alone_is_reported_alone() -> None:
    for fault in (broken.SharesItsState, broken.SplitsOverlap, broken.SeedsTheGlobalGenerator):
        report = check_environment(fault, new_process=False)
        assert [violation.check for violation in report.violations] == [FAULTS[fault]]


def test_garbage_is_not_left_behind_and_hides_nothing() -> None:
    assert gc.isenabled()
    report = check_environment(broken.KeepsItselfUntilCollected, new_process=False)
    assert report.ok, report
    older = [broken.KeepsItselfUntilCollected() for _ in range(20)]
    del older
    report = check_environment(broken.HasNoClose, new_process=False)
    assert [violation.check for violation in report.violations] == [Check.TEARDOWN]
    assert gc.isenabled()


def test_what_another_thread_draws_now_and_then_is_not_the_environments_fault() -> None:
    draws = cycle([True, False])

    def made(split: Split = "train") -> Environment:
        with ThreadPoolExecutor(1) as another:
            another.submit(random.random if next(draws) else int).result()
        return broken.Right(split)

    assert check_environment(made, new_process=False).ok


def test_dependence_on_the_hash_seed_is_caught_in_a_new_process() -> None:
    report = check_environment(broken.DiffersByHashSeed)
    assert [violation.check for violation in report.violations] == [Check.NEW_PROCESS]


def test_a_right_environment_passes_every_check() -> None:
    report = check_environment(broken.Right)
    assert report.ok
    assert set(report.passed) == set(Check) - SEVERAL


TOOLS = {"double": lambda arguments: str(2 * arguments["of"])}


def test_demonstrations_with_tools_are_played_with_the_tools_given() -> None:
    report = check_environment(broken.WithTools, tools=TOOLS)
    assert report.ok
    assert Check.DEMONSTRATION in report.passed
    without = check_environment(broken.WithTools, new_process=False)
    assert without.ok
    assert without.skipped[Check.DEMONSTRATION] == "it calls tools, and none were given"


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (broken.CallsForEver, Check.DEMONSTRATION),
        (broken.CallsNothing, Check.TYPES),
        (broken.CallsWithASet, Check.TYPES),
        (broken.IgnoresItsTool, Check.DEMONSTRATION),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_faults_of_demonstrations_with_tools_are_caught(fault: type[Environment], check: Check) -> None:
    report = check_environment(fault, tools=TOOLS, new_process=False)
    assert [violation.check for violation in report.violations] == [check]


def test_demonstrations_with_other_tools_are_not_played_and_it_is_told() -> None:
    report = check_environment(broken.CallsAnotherTool, tools=TOOLS, new_process=False)
    assert report.ok
    assert report.skipped[Check.DEMONSTRATION] == "it calls 'triple', which was not given"


@pytest.mark.parametrize("fault", [broken.CallsDifferently, broken.CallsNothing, broken.CallsWithASet])
def test_calls_are_looked_at_without_tools(fault: type[Environment]) -> None:
    report = check_environment(fault, new_process=False)
    assert [violation.check for violation in report.violations] == [Check.DEMONSTRATION]


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
        ("gomoku", {}),
        ("gomoku", {"size": 3, "line": 3, "opponent": "heuristic", "retries": 1, "show": "move"}),
        ("guess_number", {}),
        ("guess_number", {"low": 0, "high": 9, "least": 3, "attempts": 6, "discount": 0.5}),
        ("tool_math", {}),
        ("tool_math", {"operations": "+-*", "operands": 3, "parts": 2, "demonstrate": "parts"}),
        ("reasoning_gym/leg_counting", {}),
        ("reasoning_gym/countdown", {"min_numbers": 3, "max_numbers": 3, "extract": "tag", "partial": False}),
        ("reasoning_gym/isomorphic_strings", {"extract": "last_line"}),
        ("reasoning_gym/rush_hour", {}),
    ],
)
def test_shipped_environments_conform(id: str, args: dict) -> None:
    assert_conforms(id, args, seeds=4, tools={"calculator": calculate})


def calculate(arguments: Mapping[str, Any]) -> str:
    return Calculator().call(arguments, Deadline.after(60)).text
