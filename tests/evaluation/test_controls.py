from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.evaluation.controls import shuffle_rewards

REWARDS = st.lists(st.none() | st.floats(-1, 1))


@given(REWARDS, st.integers(0, 2**63 - 1))
def test_rewards_are_permuted_and_missing_ones_stay(rewards: list[float | None], seed: int) -> None:
    shuffled = shuffle_rewards(rewards, seed)
    assert Counter(shuffled) == Counter(rewards)
    assert [reward is None for reward in shuffled] == [reward is None for reward in rewards]
    assert shuffled == shuffle_rewards(rewards, seed)


def test_every_reward_reaches_every_place_equally_often() -> None:
    rewards = [1.0, 0.0, None, 0.0, 0.0]
    places = Counter(shuffle_rewards(rewards, seed).index(1.0) for seed in range(2000))
    assert set(places) == {0, 1, 3, 4}
    assert all(420 < count < 580 for count in places.values())
