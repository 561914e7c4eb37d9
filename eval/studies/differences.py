"""Means of arms, and their paired differences from a reference arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval.scores.intervals import Games, paired_difference
from eval.studies.scores import Scores, Values

ALL = "all"
"""In the place of a horizon: the mean over all of them."""
STUDIED = ("em", "f1", "nats")


@dataclass(frozen=True)
class Mean:
    """Of one arm, over windows and seeds. nats are of one observation."""

    arm: str
    regime: str
    metric: str
    horizon: int | str
    mean: float
    by_seed: tuple[float, ...]


@dataclass(frozen=True)
class Difference:
    """Arm minus reference over the same windows and seeds; low and high are 95 % bounds over games of the mean over
    seeds. counts: the bounds exclude zero and every seed has the same sign."""

    arm: str
    reference: str
    regime: str
    metric: str
    horizon: int | str
    windows: int
    difference: float
    low: float
    high: float
    by_seed: tuple[float, ...]
    counts: bool


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
            found.append(_difference(names, regime, metric, horizon, ours, theirs, games))
    return found


def _difference(
    names: tuple[str, str], regime: str, metric: str, horizon: int | str, ours: Values, theirs: Values, games: Games
) -> Difference:
    """ours, theirs: (seeds, windows)."""
    paired = paired_difference(metric, 0, ours.mean(0), theirs.mean(0), games)
    by_seed = (ours - theirs).mean(1)
    counts = bool((paired.low > 0 and (by_seed > 0).all()) or (paired.high < 0 and (by_seed < 0).all()))
    bounds = (paired.difference, paired.low, paired.high)
    return Difference(*names, regime, metric, horizon, paired.n, *bounds, tuple(by_seed.tolist()), counts)


def _columns(seeds: Sequence[Scores], metric: str, horizons: Sequence[int]) -> list[tuple[int | str, Values]]:
    """(horizon, values (seeds, windows)), the mean over horizons first; nothing for a metric that is not there."""
    if any(metric not in scores for scores in seeds):
        return []
    values = np.stack([scores[metric] for scores in seeds])
    return [(ALL, values.mean(2)), *((k, values[:, :, i]) for i, k in enumerate(horizons))]
