"""Matches: how often agents win, and how strong versions are that played each other.

Axes: N episodes, P players (versions).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from math import log
from statistics import NormalDist

import numpy as np

from opentinker_core.evaluation.intervals import Interval, mean_interval

_ELO = 400 / log(10)
"""Points of the Elo scale in one unit of log-odds: 400 points are odds of ten to one."""
_ROUNDS = 200
_CLOSE_ENOUGH = 1e-12


class Outcome(StrEnum):
    """What an episode was for one of its agents."""

    WIN = "win"
    """No other agent earned as much."""
    DRAW = "draw"
    """None earned more, and some as much."""
    LOSS = "loss"


@dataclass(frozen=True)
class Rates:
    """How an agent's episodes went; the three rates sum to 1."""

    win: Interval
    draw: Interval
    loss: Interval
    score: Interval
    """Wins, and draws as half a win."""


@dataclass(frozen=True)
class Game:
    """One comparison of two players."""

    first: str
    second: str
    score: float
    """Of the first: 1 it won, 0.5 a draw, 0 it lost."""


def outcomes(rewards: Mapping[str, float | None]) -> dict[str, Outcome] | None:
    """Agent → outcome of one episode of two or more agents; None if a reward is missing.

    Raises:
        ValueError: fewer than two agents.
    """
    if len(rewards) < 2:
        raise ValueError(f"rewards: of {len(rewards)} agents; accepted: of two or more")
    known = {agent: reward for agent, reward in rewards.items() if reward is not None}
    if len(known) < len(rewards):
        return None
    most = max(known.values())
    best = [agent for agent, reward in known.items() if reward == most]
    first = Outcome.WIN if len(best) == 1 else Outcome.DRAW
    return {agent: first if agent in best else Outcome.LOSS for agent in known}


def match_rates(
    episodes: Sequence[Mapping[str, float | None]], clusters: Sequence[int], confidence: float = 0.95
) -> dict[str, Rates]:
    """Agent → its rates over the episodes in which no reward is missing.

    Args:
        episodes: agent → reward, for each episode; all of the same agents.
        clusters: what each episode began with; those that began alike count together.

    Raises:
        ValueError: other agents in one episode than in another, fewer than two of them, unequal
            lengths, or no episode without a missing reward.
    """
    if len(episodes) != len(clusters):
        raise ValueError(f"clusters: {len(clusters)} for {len(episodes)} episodes; accepted: one each")
    for place, rewards in enumerate(episodes):
        if rewards.keys() != episodes[0].keys():
            raise ValueError(
                f"episodes[{place}]: agents {', '.join(sorted(rewards))}; accepted: as in the first, "
                f"{', '.join(sorted(episodes[0]))}"
            )
    found = [(outcomes(rewards), cluster) for rewards, cluster in zip(episodes, clusters, strict=True)]
    usable = [(outcome, cluster) for outcome, cluster in found if outcome is not None]
    if not usable:
        raise ValueError("episodes: none without a missing reward; accepted: at least one")
    kept = [cluster for _, cluster in usable]

    def rate(agent: str, worth: Mapping[Outcome, float]) -> Interval:
        return mean_interval([worth.get(outcome[agent], 0.0) for outcome, _ in usable], kept, confidence)

    return {
        agent: Rates(
            win=rate(agent, {Outcome.WIN: 1.0}),
            draw=rate(agent, {Outcome.DRAW: 1.0}),
            loss=rate(agent, {Outcome.LOSS: 1.0}),
            score=rate(agent, {Outcome.WIN: 1.0, Outcome.DRAW: 0.5}),
        )
        for agent in episodes[0]
    }


def games(players: Mapping[str, str], rewards: Mapping[str, float | None]) -> list[Game]:
    """The comparisons that one episode gives: each two of its agents by their rewards.

    Args:
        players: agent → version. A version that plays both agents of a pair is not compared with itself.
        rewards: agent → reward; None: missing, and not compared.
    """
    found = []
    for one, other in combinations(players, 2):
        mine, theirs = rewards[one], rewards[other]
        if mine is not None and theirs is not None and players[one] != players[other]:
            score = 0.5 if mine == theirs else float(mine > theirs)
            found.append(Game(players[one], players[other], score))
    return found


def expected_score(difference: float) -> float:
    """What a player scores on average against one who is rated `difference` Elo points lower."""
    return float(1 / (1 + 10 ** (-difference / 400)))


def ratings(
    played: Iterable[Game], *, prior_draws: float = 1.0, confidence: float = 0.95
) -> dict[str, Interval]:
    """Player → rating on the Elo scale, with mean 0; `n` of its interval is how many games it played.

    The strengths under which the games were likeliest (Bradley and Terry, Biometrika 39, 1952), a draw
    counting as half a win for both. Unlike Elo's own updates they do not depend on the order of games,
    which suits versions, whose strength does not change. Intervals are of the normal approximation: they
    are rough for few games. Who moves first may matter more than strength; let players take turns in it.

    Args:
        prior_draws: so many draws of each player with one of rating 0 are added, which keeps the
            rating of who never lost finite, and draws that of who hardly played towards 0.

    Raises:
        ValueError: no games, a game with oneself, a score outside [0, 1], `prior_draws` not above 0,
            or a confidence outside (0, 1).
    """
    names, scores_PP = _table(list(played))
    if not prior_draws > 0:
        raise ValueError(f"prior_draws: {prior_draws} is not accepted; accepted: above 0")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: {confidence} is not accepted; accepted: between 0 and 1")
    strengths_P, information_PP = _likeliest(scores_PP, prior_draws)
    # Of differences to the mean, which is what is given.
    centring_PP = np.eye(len(names)) - 1 / len(names)
    covariance_PP = centring_PP @ np.linalg.inv(information_PP) @ centring_PP.T
    half_P = NormalDist().inv_cdf((1 + confidence) / 2) * np.sqrt(np.diag(covariance_PP)) * _ELO
    points_P = (strengths_P - strengths_P.mean()) * _ELO
    games_P = (scores_PP + scores_PP.T).sum(axis=1)
    return {
        name: Interval(float(points), float(points - half), float(points + half), round(number))
        for name, points, half, number in zip(names, points_P, half_P, games_P.tolist(), strict=True)
    }


def _table(played: Sequence[Game]) -> tuple[list[str], np.ndarray]:
    """The players, sorted, and what each scored against each."""
    if not played:
        raise ValueError("played: no games; accepted: at least one")
    names = sorted({name for game in played for name in (game.first, game.second)})
    place = {name: index for index, name in enumerate(names)}
    scores_PP = np.zeros((len(names), len(names)))
    for game in played:
        if game.first == game.second:
            raise ValueError(f"played: {game.first!r} against itself; accepted: games of two players")
        if not 0 <= game.score <= 1:
            raise ValueError(f"score: {game.score} is not accepted; accepted: 0 to 1")
        one, other = place[game.first], place[game.second]
        scores_PP[one, other] += game.score
        scores_PP[other, one] += 1 - game.score
    return names, scores_PP


def _likeliest(scores_PP: np.ndarray, prior_draws: float) -> tuple[np.ndarray, np.ndarray]:
    """Log-strengths of the players, and the information (negative Hessian) there, by Newton's method."""
    games_PP = scores_PP + scores_PP.T
    theta_P = np.zeros(len(scores_PP))
    for _ in range(_ROUNDS):
        chance_PP = 1 / (1 + np.exp(theta_P[None, :] - theta_P[:, None]))
        prior_P = 1 / (1 + np.exp(-theta_P))
        gradient_P = (scores_PP - games_PP * chance_PP).sum(axis=1) + prior_draws * (0.5 - prior_P)
        weight_PP = games_PP * chance_PP * (1 - chance_PP)
        information_PP = np.diag(weight_PP.sum(axis=1) + prior_draws * prior_P * (1 - prior_P)) - weight_PP
        step_P = np.linalg.solve(information_PP, gradient_P)
        # The likelihood is concave; far from its top a whole step may overshoot, one unit does not.
        theta_P = theta_P + step_P / max(1.0, float(np.abs(step_P).max()))
        if np.abs(step_P).max() < _CLOSE_ENOUGH:
            break
    return theta_P, information_PP
