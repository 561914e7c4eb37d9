"""Plot learning curves: returns of real episodes over interactions, one line per group of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lab.reports.figures import save_figure
from loopwm.records.errors import InputError
from loopwm.records.files import read_json_lines

Curve = NDArray[np.float64]
"""(n, 2): interactions, and mean return of the episodes that ended since the last point."""


def read_curve(run: Path) -> Curve:
    """Read the curve of a run.

    Raises InputError for a folder without a returned episode, or a return without its interactions.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    points = []
    for number, record in read_json_lines(path):
        if "return" not in record:
            continue
        if "interactions" not in record:
            raise InputError(f"{path}: line {number}: interactions: missing")
        points.append((record["interactions"], record["return"]))
    if not points:
        raise InputError(f"{path}: no episode has ended yet")
    return np.array(points, dtype=np.float64)


def smoothed(curve: Curve, bins: int, limit: float) -> Curve:
    """Return the mean return in each of `bins` equal parts of 0 .. limit interactions, NaN without an ended episode."""
    edges = np.linspace(0, limit, bins + 1)
    place = np.clip(np.searchsorted(edges, curve[:, 0]) - 1, 0, bins - 1)
    means = [curve[place == i, 1].mean() if (place == i).any() else np.nan for i in range(bins)]
    return np.stack((edges[1:], means), 1)


def draw(path: Path, groups: Mapping[str, Sequence[Path]], bins: int) -> None:
    """Draw thin lines for runs and a thick one for each group's mean."""
    curves = {name: [read_curve(run) for run in runs] for name, runs in groups.items()}
    limit = max(float(curve[-1, 0]) for of_group in curves.values() for curve in of_group)
    canvas = Figure(figsize=(7, 4.5), layout="constrained")
    axes = canvas.subplots()
    for index, (name, of_group) in enumerate(curves.items()):
        parts = np.stack([smoothed(curve, bins, limit) for curve in of_group])
        for part in parts:
            axes.plot(*_without_gaps(part), color=f"C{index}", alpha=0.3, linewidth=1)
        axes.plot(*_without_gaps(parts.mean(0)), color=f"C{index}", linewidth=2, label=name)
    axes.set(xlabel="interactions", ylabel="return")
    axes.legend()
    save_figure(path, canvas)


def _without_gaps(curve: Curve) -> Curve:
    """Return interactions and returns where known, so that lines span parts without an ended episode."""
    return curve[~np.isnan(curve[:, 1])].T
