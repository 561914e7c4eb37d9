"""Means over games with their bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.scores.intervals import Values, resampled_means


def interval95(values: Values) -> Values:
    """Return percentile bounds of the columns' means, one row a game. values: (n, metrics), n >= 1; (2, metrics)."""
    return np.percentile(resampled_means(values), [2.5, 97.5], axis=0)


def estimate(values: Values) -> dict[str, Any]:
    """Return mean and bounds of one value a game, as results hold them. values: (n,), n >= 1."""
    return {"mean": float(values.mean()), "ci95": interval95(values[:, None])[:, 0].tolist()}


def over_runs(runs: Sequence[Mapping[str, Mapping[str, Sequence[float]]]]) -> dict[str, Any]:
    """Return each arm's means with bounds, and those of the last arm less the first.

    runs: by measure and arm a figure of each game, the same games in the same order. Games are resampled, after a mean
    over the runs, which may differ in their seeds.
    """
    arms: dict[str, dict[str, Any]] = {}
    difference = {}
    for measure, of_arms in runs[0].items():
        means = {arm: np.mean([run[measure][arm] for run in runs], axis=0) for arm in of_arms}
        for arm, values in means.items():
            arms.setdefault(arm, {})[measure] = estimate(values)
        first, *_, last = means.values()
        difference[measure] = estimate(last - first)
    return {"arms": arms, "difference": difference}
