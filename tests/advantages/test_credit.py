"""Credit by hand, and what it promises for any episodes: missing ones, other roles, any order."""

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.advantages import advantages
from opentinker_core.advantages.credit import AgentPart, Credit, credit
from opentinker_core.advantages.running import RunningMean
from opentinker_core.config.credit import Advantage, Baseline, CreditConfig, Returns
from opentinker_core.errors import UsageError

ESTIMATORS, BASELINES = list(Advantage), list(Baseline)
RELATIVE = [Baseline.GROUP, Baseline.TURN]

rewards = st.floats(-100, 100)
turns = st.lists(rewards, min_size=1, max_size=4).map(tuple)
estimators = st.sampled_from(ESTIMATORS)
configs = st.one_of(
    st.builds(CreditConfig, baseline=st.sampled_from(BASELINES), momentum=st.floats(0, 0.99)),
    st.builds(
        CreditConfig,
        returns=st.just(Returns.TURN),
        discount=st.sampled_from([1.0, 0.9, 0.5]),
        baseline=st.sampled_from(BASELINES),
        momentum=st.floats(0, 0.99),
    ),
)
running = st.dictionaries(
    st.sampled_from("XO"), st.builds(RunningMean, mean=rewards, steps=st.integers(1, 50))
)


def parts_of(roles: str = "XO", known: st.SearchStrategy[tuple[float, ...]] = turns) -> st.SearchStrategy:
    rewards_of = st.none() | known | st.just(())
    return st.lists(st.builds(AgentPart, st.integers(0, 2), st.sampled_from(roles), rewards_of), max_size=10)


def shown(found: Credit) -> list[list[float] | None]:
    return [None if one is None else one.tolist() for one in found.advantages]


def of(*rewards: tuple[float, ...] | None, role: str = "X", task: int = 0) -> list[AgentPart]:
    return [AgentPart(task, role, one) for one in rewards]


# By hand


def test_turn_returns_are_discounted_sums_of_what_follows() -> None:
    # Sutton and Barto, Reinforcement Learning (2nd edition), exercise 3.8: discount 1/2 and the rewards
    # -1, 2, 6, 3, 2 give G_0 ... G_4 = 2, 6, 8, 4, 2.
    config = CreditConfig(returns="turn", discount=0.5, baseline="none")
    (returns,) = shown(credit(of((-1, 2, 6, 3, 2)), config, Advantage.GRPO))
    assert returns == [2, 6, 8, 4, 2]


def test_episode_returns_are_the_same_for_every_turn() -> None:
    config = CreditConfig(baseline="none")
    assert shown(credit(of((1, 0, 2), (), None), config, Advantage.GRPO)) == [[3, 3, 3], [], None]


def test_a_member_counts_once_in_its_group_however_many_turns_it_has() -> None:
    # The members' returns are 3, 0 and 0, mean 1: the two turns of the first weigh no more.
    parts = of((1, 2), (0,), (0,))
    assert shown(credit(parts, CreditConfig(), Advantage.DR_GRPO)) == [[2, 2], [-1], [-1]]
    # Each against the mean of the others: 3 - 0, 0 - 1.5.
    assert shown(credit(parts, CreditConfig(), Advantage.RLOO)) == [[3, 3], [-1.5], [-1.5]]
    # Variance (4 + 1 + 1) / 3.
    found = shown(credit(parts, CreditConfig(), Advantage.GRPO))
    np.testing.assert_allclose(found[0], np.array([2, 2]) / (math.sqrt(2) + 1e-6), rtol=1e-12)


def test_turn_returns_against_the_group() -> None:
    # Returns (3, 2) and (0,): the members' means are 2.5 and 0, the group's is 1.25.
    parts, config = of((1, 2), (0,)), CreditConfig(returns="turn")
    assert shown(credit(parts, config, Advantage.DR_GRPO)) == [[1.75, 0.75], [-1.25]]
    assert shown(credit(parts, config, Advantage.RLOO)) == [[3, 2], [-2.5]]
    # Squares 3.0625 and 0.5625 (mean 1.8125), and 1.5625: variance 1.6875.
    found = shown(credit(parts, config, Advantage.GRPO))
    np.testing.assert_allclose(found[0], np.array([1.75, 0.75]) / (math.sqrt(1.6875) + 1e-6), rtol=1e-12)


def test_turns_against_the_same_turn_of_those_that_came_so_far() -> None:
    # First turns return 3, 1 and 5 (mean 3), second ones 2 and 4 (mean 3); only one came to a third.
    config = CreditConfig(returns="turn", baseline="turn")
    parts = of((1, 2), (1,), (1, 0, 4))
    assert shown(credit(parts, config, Advantage.DR_GRPO)) == [[0, -1], [-2], [2, 1, 0]]


def test_running_baselines_are_of_a_role_and_of_the_steps_before() -> None:
    # The zero-sum game of SPIRAL (arXiv:2506.24119): of three games X wins two, so that what it is
    # compared with rises, and what O is compared with falls; a mean over both would stay 0.
    config = CreditConfig(baseline="running", momentum=0.5)
    games = [1.0, 1.0, -1.0]
    step = [part for won in games for part in (AgentPart(0, "X", (0, won)), AgentPart(0, "O", (-won,)))]
    first = credit(step, config, Advantage.GRPO)
    # The first step has no past: its own means, 1/3 and -1/3.
    np.testing.assert_allclose(first.advantages[0], [2 / 3, 2 / 3])
    np.testing.assert_allclose(first.advantages[5], [4 / 3])
    assert first.running["X"] == RunningMean(pytest.approx(1 / 3), 1)

    lost = credit(
        [AgentPart(7, "X", (-1.0,)), AgentPart(7, "O", (1.0,))], config, Advantage.GRPO, first.running
    )
    np.testing.assert_allclose(lost.advantages[0], [-4 / 3])
    np.testing.assert_allclose(lost.advantages[1], [4 / 3])
    # Weights 2/3 for the newest, 1/3 for the one before: 2/3 * -1 + 1/3 * 1/3.
    assert lost.running["X"] == RunningMean(pytest.approx(-5 / 9), 2)
    assert lost.running["O"] == RunningMean(pytest.approx(5 / 9), 2)


# For any episodes


@given(parts=parts_of(), config=configs, estimator=estimators, past=running)
def test_every_turn_with_a_reward_has_one_finite_advantage(parts, config, estimator, past) -> None:
    for part, found in zip(parts, credit(parts, config, estimator, past).advantages, strict=True):
        assert (part.rewards is None) == (found is None)
        if found is not None:
            assert found.dtype == np.float64
            assert found.shape == (len(part.rewards),)
            assert np.isfinite(found).all()


@given(
    parts=parts_of(), config=configs, estimator=estimators, past=running, dropped=st.sets(st.integers(0, 9))
)
def test_missing_parts_and_those_without_turns_change_nothing(
    parts, config, estimator, past, dropped
) -> None:
    with_holes = [
        dataclasses.replace(part, rewards=None) if place in dropped else part
        for place, part in enumerate(parts)
    ]
    kept = [part for place, part in enumerate(parts) if place not in dropped and part.rewards]
    found, alone = credit(with_holes, config, estimator, past), credit(kept, config, estimator, past)
    assert [one for one in shown(found) if one] == shown(alone)
    assert found.running == alone.running


@given(parts=parts_of("X"), others=parts_of("O"), config=configs, estimator=estimators, past=running)
def test_parts_of_another_role_change_nothing(parts, others, config, estimator, past) -> None:
    alone, together = (
        credit(parts, config, estimator, past),
        credit([*others, *parts], config, estimator, past),
    )
    assert shown(together)[len(others) :] == shown(alone)
    assert together.running.get("X") == alone.running.get("X")


@given(parts=parts_of("X"), config=configs, estimator=estimators)
def test_opposite_rewards_of_two_roles_are_not_mixed(parts, config, estimator) -> None:
    """In a zero-sum game the advantages of one side are those of the other with the opposite sign."""
    mirrored = [
        AgentPart(part.task, "O", part.rewards and tuple(-reward for reward in part.rewards))
        for part in parts
    ]
    both = shown(credit([*parts, *mirrored], config, estimator))
    assert both[: len(parts)] == shown(credit(parts, config, estimator))
    opposite = [None if one is None else [-value for value in one] for one in both[len(parts) :]]
    assert both[: len(parts)] == opposite


@given(
    parts=parts_of(),
    config=configs,
    estimator=estimators,
    past=running,
    order=st.randoms(use_true_random=False),
)
def test_the_order_of_parts_changes_no_bit(parts, config, estimator, past, order: random.Random) -> None:
    places = list(range(len(parts)))
    order.shuffle(places)
    straight = credit(parts, config, estimator, past)
    shuffled = credit([parts[place] for place in places], config, estimator, past)
    assert [shown(straight)[place] for place in places] == shown(shuffled)
    assert straight.running == shuffled.running


@pytest.mark.parametrize("baseline", RELATIVE)
@given(rewards=turns, returns=st.sampled_from(Returns), estimator=estimators)
def test_a_group_of_one_has_no_advantage(baseline, rewards, returns, estimator) -> None:
    config = CreditConfig(returns=returns, baseline=baseline)
    assert shown(credit(of(rewards), config, estimator)) == [[0.0] * len(rewards)]


@pytest.mark.parametrize("baseline", RELATIVE)
@given(parts=parts_of(), returns=st.sampled_from(Returns), task=st.integers(3, 5), value=rewards)
def test_what_a_group_has_in_common_is_no_advantage(baseline, parts, returns, task, value) -> None:
    """Members that did equally well pull in no direction, and leave the other groups alone."""
    config = CreditConfig(returns=returns, baseline=baseline)
    equals = of((0.0, value), (0.0, value), (0.0, value), task=task)
    found = shown(credit([*parts, *equals], config, Advantage.DR_GRPO))
    assert found[: len(parts)] == shown(credit(parts, config, Advantage.DR_GRPO))
    if baseline is Baseline.TURN or returns is Returns.EPISODE:
        assert found[len(parts) :] == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(episodes=st.lists(st.tuples(st.none() | rewards, st.integers(0, 3)), min_size=1, max_size=16))
def test_of_one_turn_and_one_role_it_is_the_advantage_of_the_group(estimator, episodes) -> None:
    values, groups = [value for value, _ in episodes], [group for _, group in episodes]
    expected = advantages(estimator, values, groups).tolist()
    parts = [AgentPart(group, "agent", None if value is None else (value,)) for value, group in episodes]
    for returns in Returns:
        found = shown(credit(parts, CreditConfig(returns=returns), estimator))
        assert [0.0 if one is None else one[0] for one in found] == expected


@given(
    episodes=st.lists(st.tuples(rewards, st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=12),
    data=st.data(),
)
def test_a_reward_at_the_end_alone_makes_returns_of_turns_those_of_episodes(episodes, data) -> None:
    parts = [AgentPart(task, "X", (0.0,) * (length - 1) + (value,)) for value, length, task in episodes]
    baseline, estimator = data.draw(st.sampled_from(BASELINES)), data.draw(estimators)
    by_turn = credit(parts, CreditConfig(returns="turn", baseline=baseline), estimator)
    by_episode = credit(parts, CreditConfig(returns="episode", baseline=baseline), estimator)
    assert shown(by_turn) == shown(by_episode)
    assert by_turn.running == by_episode.running


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(values=st.lists(rewards, min_size=2, max_size=8), length=st.integers(1, 4))
def test_of_equally_many_turns_both_group_baselines_agree(estimator, values, length) -> None:
    parts = of(*((0.0,) * (length - 1) + (value,) for value in values))
    by_turn = credit(parts, CreditConfig(returns="turn", baseline="turn"), estimator)
    assert shown(by_turn) == shown(credit(parts, CreditConfig(), estimator))
    expected = advantages(estimator, values, [0] * len(values)).tolist()
    assert shown(by_turn) == [[value] * length for value in expected]


@pytest.mark.parametrize("baseline", RELATIVE)
@given(parts=parts_of(), shift=st.integers(-5, 5))
def test_what_all_episodes_gain_alike_is_no_advantage(baseline, parts, shift) -> None:
    config = CreditConfig(baseline=baseline)
    known = [part for part in parts if part.rewards]
    raised = [
        dataclasses.replace(part, rewards=(part.rewards[0] + shift, *part.rewards[1:])) for part in known
    ]
    before, after = (credit(each, config, Advantage.DR_GRPO).advantages for each in (known, raised))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9)


def test_wrong_input_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"parts\[1\].rewards\[2\]: nan is not accepted; accepted: finite"):
        credit(of((1.0,), (0, 0, float("nan"))), CreditConfig(), Advantage.GRPO)
    with pytest.raises(UsageError, match="advantage: 'gae' is unknown; accepted: grpo, dr_grpo, rloo"):
        credit([], CreditConfig(), "gae")  # type: ignore[arg-type]
