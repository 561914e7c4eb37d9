"""Bootstrap intervals of means: items drawn with replacement, seeded. Paired when the values are differences."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
SEED = 0


@lru_cache(maxsize=64)
def _weights(n: int) -> NDArray[np.float64]:
    """How often each of n items is drawn in each resample, divided by n: (RESAMPLES, n)."""
    counts = np.random.default_rng(SEED).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    return counts / n


def interval95(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Percentile bounds of the means of the columns. values: (n, metrics), n >= 1; returns (2, metrics)."""
    return np.percentile(resampled_means(values), [2.5, 97.5], axis=0)


def resampled_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means of the columns in each resample. values: (n, metrics), n >= 1; returns (RESAMPLES, metrics)."""
    return _weights(len(values)) @ values
