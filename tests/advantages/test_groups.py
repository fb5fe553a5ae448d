"""Advantages of groups: by hand, with members missing, and in any order."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.advantages import advantages
from opentinker_core.config.schema import Advantage
from opentinker_core.errors import UsageError

ALL = list(Advantage)
episodes = st.lists(st.tuples(st.none() | st.floats(-100, 100), st.integers(0, 3)), min_size=1, max_size=16)


def test_grpo_divides_by_the_population_deviation() -> None:
    # Mean 2, squared deviations 1, 1, 0, 4, 4 -> variance 10 / 5 (and not 10 / 4).
    expected = np.array([-1, 1, 0, 2, -2]) / (math.sqrt(2) + 1e-6)
    result = advantages(Advantage.GRPO, [1, 3, 2, 4, 0], [0] * 5)
    np.testing.assert_allclose(result, expected, rtol=1e-12)


def test_dr_grpo_only_centres() -> None:
    assert advantages(Advantage.DR_GRPO, [1, 0, 0, 1, 5, 7], [0, 0, 0, 0, 9, 9]).tolist() == [
        0.5, -0.5, -0.5, 0.5, -1, 1,
    ]  # fmt: skip


def test_rloo_compares_with_the_others() -> None:
    np.testing.assert_allclose(advantages(Advantage.RLOO, [1, 0, 5], [4, 4, 4]), [-1.5, -3, 4.5])


@pytest.mark.parametrize("name", ALL)
def test_a_group_of_one_and_a_group_of_equals_are_zero(name: Advantage) -> None:
    assert advantages(name, [5.0, 0.1, 0.1, 0.1], [0, 1, 1, 1]).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ALL)
def test_a_missing_reward_is_not_a_reward_of_zero(name: Advantage) -> None:
    with_missing = advantages(name, [1.0, None, 3.0, None], [0, 0, 0, 1])
    first, third = advantages(name, [1.0, 3.0], [0, 0]).tolist()
    assert with_missing.tolist() == [first, 0, third, 0]
    assert with_missing.tolist() != advantages(name, [1.0, 0.0, 3.0, 0.0], [0, 0, 0, 1]).tolist()


@pytest.mark.parametrize("name", ALL)
def test_a_failure_that_leaves_one_member_leaves_no_signal(name: Advantage) -> None:
    assert advantages(name, [1.0, None, None], [0, 0, 0]).tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ALL)
@given(episodes=episodes, random=st.randoms(use_true_random=False))
def test_the_order_of_episodes_changes_no_bit(
    name: Advantage, episodes: list[tuple[float | None, int]], random: object
) -> None:
    order = list(range(len(episodes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    rewards, groups = [reward for reward, _ in episodes], [group for _, group in episodes]
    straight = advantages(name, rewards, groups)
    shuffled = advantages(name, [rewards[i] for i in order], [groups[i] for i in order])
    assert straight[order].tolist() == shuffled.tolist()


@pytest.mark.parametrize("name", ALL)
@given(episodes=episodes)
def test_each_group_sums_to_zero_and_does_not_see_the_others(
    name: Advantage, episodes: list[tuple[float | None, int]]
) -> None:
    rewards, groups = [reward for reward, _ in episodes], [group for _, group in episodes]
    result = advantages(name, rewards, groups)
    for group in set(groups):
        members = [index for index, other in enumerate(groups) if other == group]
        assert math.fsum(result[members]) == pytest.approx(0, abs=1e-6)
        alone = advantages(name, [rewards[index] for index in members], [group] * len(members))
        assert alone.tolist() == result[members].tolist()


def test_wrong_input_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"rewards\[1\]: nan"):
        advantages(Advantage.GRPO, [0.0, float("nan")], [0, 0])
    with pytest.raises(UsageError, match="groups: 1 given for 2 rewards"):
        advantages(Advantage.GRPO, [0.0, 1.0], [0])
    with pytest.raises(UsageError, match="accepted: grpo, dr_grpo, rloo"):
        advantages("gae", [0.0], [0])  # type: ignore[arg-type]
