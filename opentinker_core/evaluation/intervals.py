"""Confidence intervals of mean rewards whose samples come in clusters (several a prompt).

Axes: N samples, C clusters, B bootstrap replicates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import numpy as np

_REPLICATES = 4000
_BLOCK = 1 << 22
"""Numbers drawn at once: bounds the memory of large evaluations."""


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float
    n: int
    """Number of samples; the width depends on the number of clusters."""


def mean_interval(rewards: Sequence[float], clusters: Sequence[int], confidence: float = 0.95) -> Interval:
    """Interval of the mean reward, by a bootstrap over whole clusters; the same for the same data.

    `clusters[i]` names the prompt that reward i belongs to: samples of one prompt are alike, and
    count together. Percentiles are widened for few clusters (Hesterberg, arXiv:1411.5279).
    Where all clusters have the same mean the bootstrap sees no variation; then Wilson's bound on
    the share of clusters that could still differ is used, so that 100 % has an interval. Rewards are
    taken to lie between 0 and 1, or as far out as the largest of them; on both sides of 0, if one does.

    Raises:
        ValueError: no rewards, unequal lengths, a reward that is not finite, or a confidence
            outside (0, 1).
    """
    sums_C, counts_C = _by_cluster(rewards, clusters)
    span = max(1.0, *map(abs, rewards))
    low, high = _interval(sums_C, counts_C, confidence, (-span if min(rewards) < 0 else 0.0, span))
    return Interval(float(sums_C.sum() / counts_C.sum()), low, high, len(rewards))


def difference_interval(
    trained: Sequence[float],
    trained_clusters: Sequence[int],
    base: Sequence[float],
    base_clusters: Sequence[int],
    confidence: float = 0.95,
) -> Interval:
    """Interval of the mean reward of `trained` minus that of `base`, paired by cluster.

    Each prompt counts once, by the difference of its two means: what makes a prompt hard for both
    cancels. Prompts that only one side has (all of its episodes failed) are left out. `n` is the
    number of prompts.

    Raises:
        ValueError: as `mean_interval`, or the two have no cluster in common.
    """
    common = sorted(set(trained_clusters) & set(base_clusters))
    if not common:
        raise ValueError("clusters: trained and base have none in common, so that nothing can be paired")
    differences_C = _cluster_means(trained, trained_clusters, common) - _cluster_means(
        base, base_clusters, common
    )
    low, high = _interval(differences_C, np.ones_like(differences_C), confidence, (-1.0, 1.0))
    return Interval(float(differences_C.mean()), low, high, len(common))


def _by_cluster(rewards: Sequence[float], clusters: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Sum and number of the rewards of each cluster, in the order of the clusters' names."""
    rewards_N = np.asarray(rewards, np.float64)
    if rewards_N.ndim != 1 or len(rewards_N) == 0 or len(rewards_N) != len(clusters):
        raise ValueError(
            f"rewards: {len(rewards)} of them, clusters: {len(clusters)}; accepted: as many, not 0"
        )
    if not np.isfinite(rewards_N).all():
        raise ValueError("rewards: some are not finite; leave out the episodes whose reward is missing")
    _, index_N = np.unique(np.asarray(clusters), return_inverse=True)
    return np.bincount(index_N, rewards_N), np.bincount(index_N).astype(np.float64)


def _cluster_means(rewards: Sequence[float], clusters: Sequence[int], wanted: Sequence[int]) -> np.ndarray:
    sums_C, counts_C = _by_cluster(rewards, clusters)
    means = dict(zip(sorted(set(clusters)), sums_C / counts_C, strict=True))
    return np.array([means[cluster] for cluster in wanted])


def _interval(
    sums_C: np.ndarray, counts_C: np.ndarray, confidence: float, reach: tuple[float, float]
) -> tuple[float, float]:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: {confidence!r} is not accepted; accepted: between 0 and 1")
    means_C = sums_C / counts_C
    if np.ptp(means_C) <= 1e-12 * max(1.0, np.abs(means_C).max()):
        return _constant_interval(float(means_C[0]), len(means_C), confidence, reach)
    tail = _widened_tail(len(means_C), (1 - confidence) / 2)
    low, high = np.quantile(_replicates(sums_C, counts_C), [tail, 1 - tail])
    return float(low), float(high)


def _replicates(sums_C: np.ndarray, counts_C: np.ndarray) -> np.ndarray:
    """Means of `_REPLICATES` samples of C clusters each, drawn with replacement."""
    clusters = len(sums_C)
    random = np.random.default_rng(0)
    block = max(1, _BLOCK // clusters)
    parts = []
    for start in range(0, _REPLICATES, block):
        drawn = random.integers(clusters, size=(min(block, _REPLICATES - start), clusters))
        parts.append(sums_C[drawn].sum(axis=1) / counts_C[drawn].sum(axis=1))
    return np.concatenate(parts)


def _widened_tail(clusters: int, tail: float) -> float:
    """The percentile that makes the bootstrap of `clusters` as wide as Student's t would."""
    z, free = NormalDist().inv_cdf(1 - tail), clusters - 1
    # Cornish-Fisher expansion of the t quantile
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return NormalDist().cdf(-t * sqrt(clusters / free))


def _constant_interval(
    value: float, clusters: int, confidence: float, reach: tuple[float, float]
) -> tuple[float, float]:
    """All clusters agree: up to `share` of them could still be anything within reach.

    `share` is the upper end of Wilson's interval for 0 of `clusters`; for value 0 or 1 the result
    is Wilson's interval itself. Reach is widened where the value lies outside.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = z**2 / (clusters + z**2)
    least, most = min(reach[0], value), max(reach[1], value)
    return value + share * (least - value), value + share * (most - value)
