"""Opponents: who plays when, how often, and that a resumed run meets the same ones."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from opentinker_core.agents.league import Published, Seat, opponent_version
from opentinker_core.config.league import OpponentConfig
from opentinker_core.errors import UsageError

FIVE = [Published(step, f"player@{step + 1}") for step in range(5)]
"""What a run has published when step 5 is played: the versions of steps 0 to 4."""

histories = st.lists(st.integers(0, 20), min_size=1, max_size=12).map(
    lambda steps: [Published(step, f"player@{number}") for number, step in enumerate(sorted({0, *steps}))]
)
leagues = st.builds(
    OpponentConfig,
    kind=st.just("league"),
    window=st.integers(0, 6),
    latest_share=st.floats(0, 1),
    per=st.sampled_from(["group", "episode"]),
)
seats = st.builds(Seat, st.sampled_from(["X", "O"]), st.integers(1, 25), st.integers(0, 9), st.integers(0, 9))
seeds = st.integers(0, 2**31)


def drawn(config: OpponentConfig, episodes: int = 4000) -> Counter[str]:
    """Who plays so many groups of step 5."""
    return Counter(opponent_version(config, 7, Seat("O", 5, group, 0), FIVE) for group in range(episodes))


def league(**values: object) -> OpponentConfig:
    return OpponentConfig.model_validate({"kind": "league", **values})


def assert_shares(found: Counter[str], expected: dict[str, float]) -> None:
    """Within 3.5 standard deviations; the draws are fixed by their seeds, so this holds always or never."""
    assert found.keys() <= expected.keys()
    total = found.total()
    for ref, share in expected.items():
        assert abs(found[ref] - share * total) <= 3.5 * math.sqrt(total * share * (1 - share))


def test_the_current_version_is_the_newest_before_the_step() -> None:
    assert opponent_version(OpponentConfig(), 0, Seat("O", 5, 0, 0), FIVE) == "player@5"
    assert opponent_version(OpponentConfig(), 0, Seat("O", 2, 0, 0), FIVE) == "player@2"
    assert opponent_version(OpponentConfig(), 0, Seat("O", 99, 0, 0), FIVE) == "player@5"


@pytest.mark.parametrize("version", ["rival@3", "base"])
def test_a_frozen_version_needs_no_history(version: str) -> None:
    config = OpponentConfig(kind="frozen", version=version)
    assert opponent_version(config, 0, Seat("O", 1, 0, 0), []) == version


def test_all_of_a_league_play_equally_often() -> None:
    assert_shares(drawn(league()), {f"player@{number}": 1 / 5 for number in range(1, 6)})


def test_a_window_leaves_out_what_is_old() -> None:
    assert_shares(drawn(league(window=2)), {"player@4": 1 / 2, "player@5": 1 / 2})
    assert drawn(league(window=1), 100) == {"player@5": 100}
    assert_shares(drawn(league(window=50)), {f"player@{number}": 1 / 5 for number in range(1, 6)})


def test_the_newest_has_a_share_of_its_own() -> None:
    others = {f"player@{number}": 0.4 / 5 for number in range(1, 5)}
    assert_shares(drawn(league(latest_share=0.6)), others | {"player@5": 0.6 + 0.4 / 5})
    assert drawn(league(latest_share=1), 1000) == {"player@5": 1000}


def test_agents_steps_and_groups_draw_apart() -> None:
    def draws(agent: str = "O", step: int = 5, seed: int = 7) -> list[str]:
        return [opponent_version(league(), seed, Seat(agent, step, group, 0), FIVE) for group in range(50)]

    assert len({tuple(some) for some in (draws(), draws(agent="X"), draws(step=6), draws(seed=8))}) == 4


def test_members_of_a_group_meet_the_same_opponent_unless_each_episode_draws() -> None:
    def opponents(config: OpponentConfig) -> set[str]:
        return {opponent_version(config, 7, Seat("O", 5, 3, member), FIVE) for member in range(40)}

    assert len(opponents(league(per="group"))) == 1
    assert len(opponents(league(per="episode"))) == 5


@given(config=leagues, seed=seeds, seat=seats, history=histories, order=st.randoms(use_true_random=False))
def test_the_future_and_the_order_of_the_list_change_nothing(config, seed, seat, history, order) -> None:
    """As after a kill: more may have been published, and the catalog may list it otherwise."""
    then = [one for one in history if one.step < seat.step]
    found = opponent_version(config, seed, seat, then)
    assert found in {ref for _, ref in then}
    now = [*history, Published(seat.step, "player@98"), Published(seat.step + 3, "player@99")]
    order.shuffle(now)
    assert opponent_version(config, seed, seat, now) == found


@given(config=leagues, seed=seeds, seat=seats)
def test_who_is_alone_plays(config, seed, seat) -> None:
    assert opponent_version(config, seed, seat, [(0, "player@1")]) == "player@1"


@pytest.mark.parametrize("kind", ["current", "league"])
def test_without_a_version_before_the_step_there_is_no_opponent(kind: str) -> None:
    with pytest.raises(UsageError, match="opponent of 'O': no version was published before step 1"):
        opponent_version(OpponentConfig(kind=kind), 0, Seat("O", 1, 0, 0), [(1, "player@2")])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "frozen"}, "version: none; accepted with kind 'frozen': 'name@number' or 'base'"),
        ({"version": "a@1"}, "version: a@1; accepted with kind 'current': none"),
        ({"kind": "frozen", "version": "a@best"}, "'a@best' is no fixed version"),
        ({"kind": "frozen", "version": "a"}, "'a' is no fixed version"),
        ({"kind": "frozen", "version": "../a@1"}, "is no fixed version"),
        ({"kind": "frozen", "version": "a@1", "policy": "a"}, "policy: a; accepted with kind 'frozen': None"),
        ({"window": 3}, "window: 3; accepted with kind 'current': 0"),
        ({"kind": "frozen", "version": "base", "latest_share": 0.5}, "latest_share: 0.5; accepted with"),
        ({"per": "episode"}, "per: episode; accepted with kind 'current': group"),
        ({"kind": "league", "latest_share": 1.5}, "latest_share"),
        ({"kind": "league", "window": -1}, "window"),
        ({"kind": "past"}, "'current', 'frozen' or 'league'"),
    ],
)
def test_what_does_not_fit_the_kind_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OpponentConfig.model_validate(given)
