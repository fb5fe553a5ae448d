import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.evaluation.intervals import Interval, difference_interval, mean_interval

CLUSTERED = st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 9)), min_size=1, max_size=40)


@given(CLUSTERED)
def test_the_mean_lies_in_its_interval_and_the_order_does_not_matter(
    samples: list[tuple[float, int]],
) -> None:
    rewards, clusters = zip(*samples, strict=True)
    interval = mean_interval(rewards, clusters)
    assert interval.low <= interval.mean + 1e-9
    assert interval.mean <= interval.high + 1e-9
    assert interval.low < interval.high
    assert interval.n == len(samples)
    backwards = mean_interval(rewards[::-1], clusters[::-1])
    assert backwards.low == pytest.approx(interval.low, abs=1e-9)
    assert backwards.high == pytest.approx(interval.high, abs=1e-9)


def test_the_same_data_give_the_same_interval() -> None:
    assert mean_interval([0.0, 1.0, 1.0], [0, 1, 2]) == mean_interval([0.0, 1.0, 1.0], [0, 1, 2])


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_interval_covers_the_truth_as_often_as_it_says(confidence: float) -> None:
    random = np.random.default_rng(7)
    covered = 0
    for _ in range(300):
        hardness_C = random.beta(2, 1, size=24)
        rewards = random.binomial(1, hardness_C[:, None], (24, 4)).astype(float).ravel()
        interval = mean_interval(rewards, np.repeat(np.arange(24), 4), confidence)
        covered += interval.low <= 2 / 3 <= interval.high
    assert covered / 300 == pytest.approx(confidence, abs=0.05)


def test_samples_of_one_prompt_do_not_count_as_independent() -> None:
    rewards = [float(cluster % 2) for cluster in range(10) for _ in range(100)]
    clustered = mean_interval(rewards, [cluster for cluster in range(10) for _ in range(100)])
    pretended = mean_interval(rewards, list(range(1000)))
    assert clustered.high - clustered.low > 5 * (pretended.high - pretended.low)


def test_all_right_is_not_certainty_and_equals_wilson_on_the_clusters() -> None:
    interval = mean_interval([1.0] * 80, [index // 8 for index in range(80)])
    z = 1.959964
    assert interval == Interval(1.0, pytest.approx(10 / (10 + z**2), abs=1e-6), 1.0, 80)


def test_all_wrong_is_its_mirror_image() -> None:
    right, wrong = mean_interval([1.0] * 10, range(10)), mean_interval([0.0] * 10, range(10))
    assert (wrong.low, wrong.high) == pytest.approx((1 - right.high, 1 - right.low))


def test_one_prompt_says_little_and_equal_prompts_with_mixed_samples_are_no_certainty() -> None:
    one = mean_interval([0.0, 1.0] * 50, [0] * 100)
    assert one.high - one.low > 0.7
    even = mean_interval([0.0, 1.0] * 20, [index // 2 for index in range(40)])
    assert even.low < 0.5 < even.high


def test_a_paired_difference_cancels_how_hard_prompts_are() -> None:
    random = np.random.default_rng(3)
    hardness_C = random.uniform(0, 0.6, 30)
    base, trained = list(hardness_C), list(hardness_C + 0.3 + random.normal(0, 0.01, 30))
    paired = difference_interval(trained, range(30), base, range(30))
    assert paired.mean == pytest.approx(0.3, abs=0.01)
    assert paired.high - paired.low < 0.02
    assert paired.n == 30
    assert paired.low > 0.28


def test_a_difference_of_everything_is_not_certainty() -> None:
    interval = difference_interval([1.0] * 20, range(20), [0.0] * 20, range(20))
    assert interval.mean == interval.high == 1.0
    assert 0.5 < interval.low < 1.0


def test_a_version_compared_with_itself_has_an_interval_around_zero() -> None:
    interval = difference_interval([0.0, 1.0], [4, 7], [0.0, 1.0], [4, 7])
    assert (interval.mean, interval.low) == (0.0, -interval.high)
    assert interval.high > 0


def test_prompts_that_only_one_side_has_are_left_out() -> None:
    both = difference_interval([1.0, 0.5], [1, 2], [0.0, 0.0], [1, 2])
    assert difference_interval([1.0, 0.5, 9.0], [1, 2, 3], [0.0, 0.0, 9.0], [1, 2, 4]) == both


def test_unequal_numbers_of_samples_weigh_prompts_equally_in_a_difference() -> None:
    interval = difference_interval([1.0, 1.0, 1.0, 0.0], [0, 0, 0, 1], [0.0, 0.0], [0, 1])
    assert interval.mean == 0.5


@pytest.mark.parametrize(
    ("rewards", "clusters", "message"),
    [
        ([], [], "0 of them"),
        ([1.0], [1, 2], "clusters: 2"),
        ([float("nan")], [1], "not finite"),
        ([float("inf")], [1], "not finite"),
    ],
)
def test_unusable_rewards_are_refused(rewards: list[float], clusters: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mean_interval(rewards, clusters)


def test_a_confidence_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"confidence: 1\.0 is not accepted"):
        mean_interval([1.0], [1], 1.0)


def test_nothing_in_common_is_refused() -> None:
    with pytest.raises(ValueError, match="none in common"):
        difference_interval([1.0], [1], [1.0], [2])
