import pytest

from envs.conformance import assert_conforms, check_environment
from envs.multi import MultiEnvironment
from envs.playing import Check
from tests.envs import broken_multi as broken

# what the fault must be reported as; more may follow from it
FAULTS = {
    broken.RaisesOnText: Check.PLAYS,
    broken.ReturnsATuple: Check.TYPES,
    broken.AgentsAreAList: Check.TYPES,
    broken.AgentsChange: Check.TYPES,
    broken.ToActIsAList: Check.TYPES,
    broken.TogetherIsANumber: Check.TYPES,
    broken.RewardsAStranger: Check.TYPES,
    broken.RewardIsText: Check.TYPES,
    broken.ObservationOfText: Check.TYPES,
    broken.RewardsAtReset: Check.TYPES,
    broken.AsksWhoWasShownNothing: Check.TYPES,
    broken.InfiniteReward: Check.REWARDS,
    broken.InfoIsNotJson: Check.INFO,
    broken.NeverEnds: Check.ENDS,
    broken.StepsAfterTheEnd: Check.ORDER,
    broken.RefusesWithAnotherError: Check.ORDER,
    broken.CountsItsEpisodes: Check.SAME_INSTANCE,
    broken.DiffersByInstance: Check.FRESH_INSTANCE,
    broken.SharesItsState: Check.ISOLATION,
    broken.BoundToItsThread: Check.THREADS,
    broken.SplitsOverlap: Check.SPLITS,
    broken.SeedsTheGlobalGenerator: Check.GLOBAL_RANDOM,
    broken.FirstGivenIsFirst: Check.ACTION_ORDER,
    broken.TakesAnything: Check.REFUSAL,
    broken.ChangesBeforeItRefuses: Check.REFUSAL,
    broken.NobodyMayLeave: Check.LEAVING,
    broken.AsksWhoLeft: Check.LEAVING,
    broken.RecomputesWrongly: Check.RECOMPUTE,
    broken.RecomputingDisturbs: Check.RECOMPUTE,
    broken.DemonstratesToAll: Check.DEMONSTRATION,
    broken.DemonstratesDifferently: Check.DEMONSTRATION,
    broken.DemonstratingIsAMove: Check.DEMONSTRATION,
    broken.ClosesOnce: Check.TEARDOWN,
    broken.ClosesAfterPlayAlone: Check.TEARDOWN,
    broken.KeepsItsPipe: Check.TEARDOWN,
    broken.HasNoClose: Check.TEARDOWN,
    broken.ClosesForAll: Check.TEARDOWN,
}
ALONE = [
    broken.SharesItsState,
    broken.BoundToItsThread,
    broken.SplitsOverlap,
    broken.SeedsTheGlobalGenerator,
    broken.TakesAnything,
    broken.ChangesBeforeItRefuses,
    broken.NobodyMayLeave,
    broken.AsksWhoLeft,
    broken.RecomputesWrongly,
    broken.RecomputingDisturbs,
    broken.DemonstratesToAll,
    broken.ClosesOnce,
    broken.ClosesAfterPlayAlone,
    broken.KeepsItsPipe,
    broken.HasNoClose,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_is_caught_and_named(fault: type[MultiEnvironment]) -> None:
    report = check_environment(fault, new_process=False, seeds=4, max_turns=20)
    assert FAULTS[fault] in [violation.check for violation in report.violations]


@pytest.mark.parametrize("fault", ALONE, ids=lambda fault: fault.__name__)
def test_a_fault_that_stands_alone_is_reported_alone(fault: type[MultiEnvironment]) -> None:
    report = check_environment(fault, new_process=False, seeds=4, max_turns=20)
    assert [violation.check for violation in report.violations] == [FAULTS[fault]]


def test_dependence_on_the_hash_seed_is_caught_in_a_new_process() -> None:
    report = check_environment(broken.DiffersByHashSeed, seeds=4)
    assert [violation.check for violation in report.violations] == [Check.NEW_PROCESS]


@pytest.mark.parametrize("right", [broken.Right, broken.OneAfterTheOther, broken.Holds])
def test_a_right_environment_passes_every_check(right: type[MultiEnvironment]) -> None:
    report = check_environment(right)
    assert str(report) == f"tests.envs.broken_multi:{right.__name__}: conforms"
    assert set(report.passed) == set(Check)


def test_endless_episodes_are_accepted_when_declared() -> None:
    report = check_environment(broken.NeverEndsAndSaysSo, new_process=False, max_turns=20)
    assert report.ok
    assert report.skipped[Check.ENDS] == "declared unlimited"


def test_what_is_not_offered_is_not_checked() -> None:
    class Bare:
        def __init__(self, split: str = "train") -> None:
            self.right = broken.Right(split)  # type: ignore[arg-type]
            self.agents = self.right.agents
            self.reset, self.step = self.right.reset, self.right.step

    report = check_environment(Bare)
    assert report.ok
    assert set(report.skipped) == {Check.NEW_PROCESS, Check.RECOMPUTE, Check.DEMONSTRATION}


@pytest.mark.parametrize(
    ("id", "args"),
    [
        ("gomoku_match", {}),
        ("gomoku_match", {"size": 3, "line": 3, "rewards": "score", "opening": 1, "show": "move"}),
        ("collect", {}),
        ("collect", {"agents": 5, "size": 4, "items": 1, "rounds": 5, "others": False}),
        ("negotiate", {}),
        ("negotiate", {"agents": 3, "order": "free"}),
        ("negotiate", {"agents": 4, "kinds": 2, "least": 4, "most": 5, "messages": 2}),
    ],
)
def test_shipped_environments_conform(id: str, args: dict) -> None:
    assert_conforms(id, args, seeds=4)


@pytest.mark.parametrize(
    "id", ["gomoku_match", "collect", "negotiate", "gomoku", "guess_number", "arithmetic", "tool_math"]
)
def test_64_episodes_at_once_do_not_disturb_each_other(id: str) -> None:
    """Turn by turn, and in threads; each episode's own problem is its canary."""
    report = check_environment(id, seeds=32, new_process=False)
    assert report.ok
    assert {Check.ISOLATION, Check.THREADS} <= set(report.passed)
