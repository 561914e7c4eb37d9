"""Calibration of a probability that predictions are right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BINS = 10
Probabilities = NDArray[np.float64]
Right = NDArray[np.bool_]


@dataclass(frozen=True)
class Bin:
    """Predictions whose trust is in one tenth of 0 .. 1. trust, right: means over its n predictions."""

    n: int
    trust: float
    right: float


@dataclass(frozen=True)
class Calibration:
    """Quality of the trust in n predictions.

    right: share that is exactly right. auroc: chance that a right one has more trust than a wrong one, NaN without both
    kinds. ece: expected calibration error over `bins`. right_at: share that is right among the 50 and 80 % with the
    most trust.
    """

    n: int
    right: float
    auroc: float
    ece: float
    right_at: dict[int, float]
    bins: tuple[Bin, ...]


def calibrate(trust: Probabilities, right: Right) -> Calibration:
    """Compare the trust in predictions (N,) with whether they were right (N,). N must be above zero."""
    number = np.minimum((trust * BINS).astype(int), BINS - 1)
    members = [number == i for i in range(BINS)]
    bins = tuple(Bin(int(m.sum()), float(trust[m].mean()), float(right[m].mean())) for m in members if m.any())
    ece = sum(b.n * abs(b.trust - b.right) for b in bins) / len(trust)
    right_at = {percent: _right_among(trust, right, percent) for percent in (50, 80)}
    return Calibration(len(trust), float(right.mean()), auroc(trust, right), ece, right_at, bins)


def auroc(trust: Probabilities, right: Right) -> float:
    """Return the area under the ROC curve; equal trust counts half."""
    of_right, of_wrong = trust[right], np.sort(trust[~right])
    if not len(of_right) or not len(of_wrong):
        return float("nan")
    below = np.searchsorted(of_wrong, of_right, "left") + np.searchsorted(of_wrong, of_right, "right")
    return float(below.mean() / 2 / len(of_wrong))


def _right_among(trust: Probabilities, right: Right, percent: int) -> float:
    # Stable: the order of the windows decides among equals.
    most = np.argsort(-trust, kind="stable")[: max(1, len(trust) * percent // 100)]
    return float(right[most].mean())
