"""Paired differences over seeds; for text models, means and differences by horizon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from eval.scores.intervals import Games, paired_difference
from lab.studies.window_scores import Scores, Values

ALL = "all"
"""Horizon value of the mean over all horizons."""
STUDIED = ("em", "f1", "nats")


@dataclass(frozen=True)
class Mean:
    """Mean of one arm over windows and seeds. nats are per observation."""

    arm: str
    regime: str
    metric: str
    horizon: int | str
    mean: float
    by_seed: tuple[float, ...]


@dataclass(frozen=True)
class SeedDifference:
    """Paired difference over the same items and seeds; subclasses name the sides.

    low, high: 95 % bounds over games of the mean over seeds
    counts: True if the bounds exclude zero and every seed has the same sign
    """

    difference: float
    low: float
    high: float
    by_seed: tuple[float, ...]
    counts: bool

    @classmethod
    def of(cls, ours: Values, theirs: Values, games: Games, /, **compared: Any) -> Self:
        """Compute a difference.

        Args:
            ours: (seeds, items)
            theirs: (seeds, items)
            games: games of items
            compared: fields of the subclass
        """
        paired = paired_difference("", 0, ours.mean(0), theirs.mean(0), games)
        by_seed = (ours - theirs).mean(1)
        counts = bool((paired.low > 0 and (by_seed > 0).all()) or (paired.high < 0 and (by_seed < 0).all()))
        return cls(paired.difference, paired.low, paired.high, tuple(by_seed.tolist()), counts, **compared)


@dataclass(frozen=True)
class Difference(SeedDifference):
    """Arm minus reference over the same windows."""

    arm: str
    reference: str
    regime: str
    metric: str
    horizon: int | str
    windows: int


def means(arm: str, regime: str, seeds: Sequence[Scores], horizons: Sequence[int]) -> list[Mean]:
    rows = []
    for metric in STUDIED:
        for horizon, values in _columns(seeds, metric, horizons):
            by_seed = tuple(values.mean(1).tolist())
            rows.append(Mean(arm, regime, metric, horizon, float(values.mean()), by_seed))
    return rows


def differences(
    names: tuple[str, str],
    regime: str,
    arm: Sequence[Scores],
    reference: Sequence[Scores],
    horizons: Sequence[int],
    games: Games,
) -> list[Difference]:
    """Compute all differences of two arms over the same seeds and windows.

    Args:
        names: arm and reference
        regime: kind of context
        arm: scores by seed
        reference: scores by seed
        horizons: horizons of the scores
        games: games of windows
    """
    rows = []
    for metric in STUDIED:
        columns = zip(_columns(arm, metric, horizons), _columns(reference, metric, horizons), strict=False)
        for (horizon, ours), (_, theirs) in columns:
            compared = {"regime": regime, "metric": metric, "horizon": horizon, "windows": ours.shape[1]}
            rows.append(Difference.of(ours, theirs, games, arm=names[0], reference=names[1], **compared))
    return rows


def _columns(seeds: Sequence[Scores], metric: str, horizons: Sequence[int]) -> list[tuple[int | str, Values]]:
    """Return (horizon, values (seeds, windows)), the mean over horizons first; empty for a missing metric."""
    if any(metric not in scores for scores in seeds):
        return []
    values = np.stack([scores[metric] for scores in seeds])
    return [(ALL, values.mean(2)), *((k, values[:, :, i]) for i, k in enumerate(horizons))]
