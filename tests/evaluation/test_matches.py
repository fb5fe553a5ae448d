"""Rates of matches and ratings of versions, against values known from elsewhere."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.evaluation.matches import (
    Game,
    Outcome,
    expected_score,
    games,
    match_rates,
    outcomes,
    ratings,
)

# Games that the teams of the American League's Eastern Division won against each other in 1987, and what
# Bradley and Terry's model makes of them: Agresti, Categorical Data Analysis (2nd edition), section 10.6.
TEAMS = ["Milwaukee", "Detroit", "Toronto", "New York", "Boston", "Cleveland", "Baltimore"]
WON = [
    [0, 7, 9, 7, 7, 9, 11],
    [6, 0, 7, 5, 11, 9, 9],
    [4, 6, 0, 7, 7, 8, 12],
    [6, 8, 6, 0, 6, 7, 10],
    [6, 2, 6, 7, 0, 7, 12],
    [4, 4, 5, 6, 6, 0, 6],
    [2, 4, 1, 3, 1, 7, 0],
]
ABOVE_BALTIMORE = [1.58, 1.44, 1.29, 1.25, 1.11, 0.68, 0.00]
NO_PRIOR = 1e-9
LOG_ODDS = math.log(10) / 400

some_games = st.lists(
    st.tuples(st.sampled_from("abcde"), st.sampled_from("abcde"), st.sampled_from([0.0, 0.5, 1.0]))
    .filter(lambda game: game[0] != game[1])
    .map(lambda game: Game(*game)),
    min_size=1,
    max_size=40,
)


def season() -> list[Game]:
    return [
        Game(TEAMS[i], TEAMS[j], 1.0)
        for i, row in enumerate(WON)
        for j, won in enumerate(row)
        for _ in range(won)
    ]


# Outcomes


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ({"X": 1.0, "O": -1.0}, ["win", "loss"]),
        ({"X": 0.0, "O": 0.0}, ["draw", "draw"]),
        ({"a": 2.0, "b": 3.0, "c": 1.0}, ["loss", "win", "loss"]),
        ({"a": 3.0, "b": 3.0, "c": 1.0}, ["draw", "draw", "loss"]),
        ({"a": 0.0, "b": 0.0, "c": 0.0}, ["draw", "draw", "draw"]),
    ],
)
def test_who_earned_most_won(rewards: dict[str, float], expected: list[str]) -> None:
    assert outcomes(rewards) == dict(zip(rewards, map(Outcome, expected), strict=True))


def test_with_a_missing_reward_nobody_won() -> None:
    assert outcomes({"X": 1.0, "O": None}) is None


# Rates


def test_rates_by_hand() -> None:
    won, lost, drawn = {"X": 1.0, "O": -1.0}, {"X": -1.0, "O": 1.0}, {"X": 0.0, "O": 0.0}
    missing = {"X": 1.0, "O": None}
    rates = match_rates([won] * 5 + [lost] * 3 + [drawn] * 2 + [missing] * 4, range(14))
    x, o = rates["X"], rates["O"]
    assert (x.win.mean, x.draw.mean, x.loss.mean, x.score.mean) == (0.5, 0.2, 0.3, 0.6)
    assert (o.win, o.draw, o.loss) == (x.loss, x.draw, x.win)
    assert x.win.n == 10
    assert x.win.low < 0.5 < x.win.high


def test_episodes_that_began_alike_count_together() -> None:
    episodes = [{"X": float(place % 4 == 0), "O": 0.5} for place in range(40)]
    apart = match_rates(episodes, range(40))["X"].win
    together = match_rates(episodes, [0 if place % 4 == 0 else 1 for place in range(40)])["X"].win
    assert together.mean == apart.mean == 0.25
    assert together.high - together.low > apart.high - apart.low


def test_winning_always_leaves_room_for_doubt() -> None:
    # Wilson's interval for 20 of 20: low 1 / (1 + z^2 / 20).
    win = match_rates([{"X": 1.0, "O": 0.0}] * 20, range(20))["X"].win
    assert (win.low, win.high) == (pytest.approx(0.8389, abs=1e-4), 1.0)


@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1, max_size=12))
def test_the_rates_of_an_agent_sum_to_one(rewards: list[list[int]]) -> None:
    episodes = [dict(zip("abc", map(float, one), strict=True)) for one in rewards]
    for rates in match_rates(episodes, range(len(episodes))).values():
        assert rates.win.mean + rates.draw.mean + rates.loss.mean == pytest.approx(1)
        assert rates.score.mean == pytest.approx(rates.win.mean + rates.draw.mean / 2)


@pytest.mark.parametrize(
    ("episodes", "clusters", "message"),
    [
        ([{"X": 1.0}], [0], "rewards: of 1 agents; accepted: of two or more"),
        ([{"X": 1.0, "O": 0.0}], [0, 1], "clusters: 2 for 1 episodes"),
        ([{"X": 1.0, "O": None}], [0], "none without a missing reward"),
        ([], [], "none without a missing reward"),
        ([{"X": 1.0, "O": 0.0}, {"X": 1.0, "Y": 0.0}], [0, 1], r"episodes\[1\]: agents X, Y; .* O, X"),
    ],
)
def test_rates_of_what_cannot_be_compared_are_refused(episodes, clusters, message) -> None:
    with pytest.raises(ValueError, match=message):
        match_rates(episodes, clusters)


# Games


def test_an_episode_compares_each_two_versions() -> None:
    players = {"X": "player@4", "O": "player@2"}
    assert games(players, {"X": -1.0, "O": 1.0}) == [Game("player@4", "player@2", 0.0)]
    three = games({"a": "p@1", "b": "p@2", "c": "p@1"}, {"a": 2.0, "b": 2.0, "c": 1.0})
    assert three == [Game("p@1", "p@2", 0.5), Game("p@2", "p@1", 1.0)]
    assert games(players, {"X": None, "O": 1.0}) == []


# Ratings


def test_ratings_are_those_that_are_known_of_a_season() -> None:
    found = ratings(season(), prior_draws=NO_PRIOR)
    differences = [(found[team].mean - found["Baltimore"].mean) * LOG_ODDS for team in TEAMS]
    np.testing.assert_allclose(differences, ABOVE_BALTIMORE, atol=0.005)
    assert {one.n for one in found.values()} == {78}


def test_the_difference_of_two_players_is_what_their_games_say() -> None:
    played = [Game("new", "old", 1.0)] * 30 + [Game("old", "new", 1.0)] * 10
    found = ratings(played, prior_draws=NO_PRIOR)
    difference = found["new"].mean - found["old"].mean
    assert difference == pytest.approx(400 * math.log10(3), abs=1e-3)
    assert expected_score(difference) == pytest.approx(0.75, abs=1e-6)
    # The variance of log-odds is 1/30 + 1/10; a player differs from the mean by half of the difference.
    half = 1.959964 * math.sqrt(1 / 30 + 1 / 10) / LOG_ODDS / 2
    assert found["new"].high - found["new"].mean == pytest.approx(half, rel=1e-4)


def test_a_draw_is_half_a_win() -> None:
    drawn = ratings([Game("a", "b", 0.5)] * 4 + [Game("a", "b", 1.0)])
    assert drawn == ratings([Game("a", "b", 1.0)] * 3 + [Game("b", "a", 1.0)] * 2)


def test_who_never_lost_has_a_finite_rating_that_grows_with_the_evidence() -> None:
    few, many = (ratings([Game("a", "b", 1.0)] * number)["a"] for number in (5, 500))
    assert 0 < few.mean < many.mean < 2000
    assert few.low < many.low


def test_400_points_are_odds_of_ten_to_one() -> None:
    assert expected_score(0) == 0.5
    assert expected_score(400) == pytest.approx(10 / 11)
    assert expected_score(-400) == pytest.approx(1 / 11)


@given(played=some_games, order=st.randoms(use_true_random=False))
def test_order_and_sides_of_the_games_do_not_matter(played: list[Game], order: random.Random) -> None:
    found = ratings(played)
    other = [
        Game(game.second, game.first, 1 - game.score) if order.random() < 0.5 else game for game in played
    ]
    order.shuffle(other)
    again = ratings(other)
    assert sum(one.mean for one in found.values()) == pytest.approx(0, abs=1e-6)
    for name, one in found.items():
        assert again[name].mean == pytest.approx(one.mean, abs=1e-6)
        assert one.low < one.mean < one.high or one.low == pytest.approx(one.high)


@given(played=some_games)
def test_ratings_expect_the_scores_that_were_played(played: list[Game]) -> None:
    """The likeliest strengths are those that explain each player's total, the draws of the prior included."""
    found = ratings(played, prior_draws=1e-3)
    for name in found:
        mine = [(game.second, game.score) for game in played if game.first == name]
        mine += [(game.first, 1 - game.score) for game in played if game.second == name]
        expected = sum(expected_score(found[name].mean - found[other].mean) for other, _ in mine)
        assert expected == pytest.approx(sum(score for _, score in mine), abs=1e-3)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    truth = {"a": 150.0, "b": 0.0, "c": -150.0}
    pairs, draws, covered = [("a", "b"), ("b", "c"), ("a", "c")], random.Random(3), 0
    for _ in range(200):
        played = [
            Game(one, other, float(draws.random() < expected_score(truth[one] - truth[other])))
            for one, other in pairs * 40
        ]
        found = ratings(played)
        covered += sum(one.low <= truth[name] <= one.high for name, one in found.items())
    assert covered / 600 == pytest.approx(0.95, abs=0.03)


@pytest.mark.parametrize(
    ("played", "options", "message"),
    [
        ([], {}, "no games"),
        ([Game("a", "a", 1.0)], {}, "'a' against itself"),
        ([Game("a", "b", 2.0)], {}, "score: 2.0 is not accepted"),
        ([Game("a", "b", float("nan"))], {}, "score: nan is not accepted"),
        ([Game("a", "b", 1.0)], {"prior_draws": 0.0}, "prior_draws: 0.0 is not accepted; accepted: above 0"),
        ([Game("a", "b", 1.0)], {"confidence": 1.0}, "confidence: 1.0 is not accepted"),
    ],
)
def test_ratings_refuse_what_cannot_be_rated(played, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        ratings(played, **options)
