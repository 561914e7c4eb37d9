"""Paired differences over seeds, as every study makes them; of text models, means and differences by horizon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from eval.scores.intervals import Games, paired_difference
from lab.studies.window_scores import Scores, Values

ALL = "all"
"""In the place of a horizon: the mean over all of them."""
STUDIED = ("em", "f1", "nats")


@dataclass(frozen=True)
class Mean:
    """The mean of one arm over windows and seeds. nats are of one observation."""

    arm: str
    regime: str
    metric: str
    horizon: int | str
    mean: float
    by_seed: tuple[float, ...]


@dataclass(frozen=True)
class SeedDifference:
    """One side minus another over the same items and seeds; low and high are 95 % bounds over games of the mean over
    seeds. counts: the bounds exclude zero and every seed has the same sign. Subclasses say what is compared."""

    difference: float
    low: float
    high: float
    by_seed: tuple[float, ...]
    counts: bool

    @classmethod
    def of(cls, ours: Values, theirs: Values, games: Games, /, **compared: Any) -> Self:
        """ours, theirs: (seeds, items); games: of items; compared: the fields of the subclass."""
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
    found = []
    for metric in STUDIED:
        for horizon, values in _columns(seeds, metric, horizons):
            by_seed = tuple(values.mean(1).tolist())
            found.append(Mean(arm, regime, metric, horizon, float(values.mean()), by_seed))
    return found


def differences(
    names: tuple[str, str],
    regime: str,
    arm: Sequence[Scores],
    reference: Sequence[Scores],
    horizons: Sequence[int],
    games: Games,
) -> list[Difference]:
    """names: of arm and reference. The scores are of the same seeds and windows in the same order, games of windows."""
    found = []
    for metric in STUDIED:
        columns = zip(_columns(arm, metric, horizons), _columns(reference, metric, horizons), strict=False)
        for (horizon, ours), (_, theirs) in columns:
            compared = {"regime": regime, "metric": metric, "horizon": horizon, "windows": ours.shape[1]}
            found.append(Difference.of(ours, theirs, games, arm=names[0], reference=names[1], **compared))
    return found


def _columns(seeds: Sequence[Scores], metric: str, horizons: Sequence[int]) -> list[tuple[int | str, Values]]:
    """(horizon, values (seeds, windows)), the mean over horizons first; nothing for a metric that is not there."""
    if any(metric not in scores for scores in seeds):
        return []
    values = np.stack([scores[metric] for scores in seeds])
    return [(ALL, values.mean(2)), *((k, values[:, :, i]) for i, k in enumerate(horizons))]
