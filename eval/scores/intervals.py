"""Compute 95 % intervals of means.

Games are resampled with replacement, seeded: windows of one game are alike, and resampling windows would make intervals
too narrow. Intervals are paired if the values are differences.

If all values are 0 or all are 1, every resample is the same: `fraction_interval95` then gives Wilson's interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
SEED = 0
INTERVALS = "games-v1"
"""Method of the intervals and standard errors; results without this mark resampled windows."""

Values = NDArray[np.float64]
Games = Sequence[str] | range
"""The game of each row."""
_Z95 = 1.959963984540054


@lru_cache(maxsize=4)
def _weights(n: int) -> Values:
    """Return how often each of n games is drawn in each resample, divided by n: (RESAMPLES, n)."""
    counts = np.random.default_rng(SEED).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    return counts / n


def resampled_means(values: Values) -> Values:
    """Return the columns' means by resample, (RESAMPLES, metrics). values: (n, metrics), n >= 1, one row a game."""
    return _weights(len(values)) @ values


def by_game(values: Values, games: Games) -> tuple[Values, Values]:
    """Return sums of the columns (G, metrics) and numbers of rows (G,) of each game.

    values: (n, metrics), games: n of them. Games are sorted by name: intervals do not depend on the rows' order.
    """
    _, index, sizes = np.unique(np.array(games), return_inverse=True, return_counts=True)
    sums = np.zeros((len(sizes), values.shape[1]))
    np.add.at(sums, index, values)  # `+=` would count repeated games once
    return sums, sizes.astype(np.float64)


def game_interval95(values: Values, games: Games) -> Values:
    """Return percentile bounds of the means over rows, games resampled with all their rows.

    values: (n, metrics), n >= 1; games: of each row. Returns (2, metrics), NaN for one game: variation is unknown.
    """
    sums, sizes = by_game(values, games)
    if len(sizes) < 2:
        return np.full((2, values.shape[1]), np.nan)
    means = resampled_means(sums) / resampled_means(sizes[:, None])
    return np.percentile(means, [2.5, 97.5], axis=0)


def fraction_interval95(values: Values, games: Games) -> Values:
    """Return `game_interval95` of values in [0, 1]; if all are 0 or all are 1, Wilson's interval of 0 or n of n games.

    E. B. Wilson, 1927, without continuity correction: [0, z^2 / (n + z^2)] and its mirror image.
    """
    bounds, mean = game_interval95(values, games), values.mean(axis=0)
    margin = _Z95**2 / (len(set(games)) + _Z95**2)
    none, every = np.array([[0.0], [margin]]), np.array([[1 - margin], [1.0]])
    return np.where(mean == 0, none, np.where(mean == 1, every, bounds))


def game_standard_errors(values: Values, games: Games) -> Values | None:
    """Return standard errors of means over rows, clustered by game (linearised ratio of sums). None for one game.

    values: (n, metrics), games: of each row. Returns (metrics,). With one row a game, std(ddof=1) / sqrt(n).
    """
    sums, sizes = by_game(values, games)
    count = len(sizes)
    if count < 2:
        return None
    rest = sums - sizes[:, None] * values.mean(axis=0)
    return np.sqrt(count / (count - 1) * (rest**2).sum(axis=0)) / len(values)


@dataclass(frozen=True)
class PairedDifference:
    """Mean of A - B over the same windows at one horizon, fractions; low and high are 95 % bounds, games resampled."""

    metric: str
    horizon: int
    n: int
    a: float
    b: float
    difference: float
    low: float
    high: float


def paired_difference(metric: str, horizon: int, a: Values, b: Values, games: Games) -> PairedDifference:
    """Return the paired difference. a, b: (n,) scores of the same windows in order, games: of each; NaN for one."""
    low, high = game_interval95((a - b)[:, None], games)[:, 0].tolist()
    mean_a, mean_b = float(a.mean()), float(b.mean())
    return PairedDifference(metric, horizon, len(a), mean_a, mean_b, mean_a - mean_b, low, high)
