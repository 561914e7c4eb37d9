"""Results of a study as Markdown tables and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.scores.tables import table
from lab.reports.figures import TITLES, save_figure
from lab.studies.differences import ALL, Difference, Mean, SeedDifference


def figure(metric: str, value: float, sign: str = "") -> str:
    """Format a score in percent, a loss in nats."""
    return f"{value:{sign}.4f}" if metric == "nats" else f"{100 * value:{sign}.1f}"


def means_table(means: Sequence[Mean], regime: str, metric: str) -> str:
    """Render one row per arm and one column per horizon."""
    chosen = [m for m in means if (m.regime, m.metric) == (regime, metric)]
    horizons = list(dict.fromkeys(m.horizon for m in chosen))
    by_arm: dict[str, dict[int | str, str]] = {}
    for m in chosen:
        by_arm.setdefault(m.arm, {})[m.horizon] = figure(metric, m.mean)
    rows = [[arm, *(cells[k] for k in horizons)] for arm, cells in by_arm.items()]
    return table([f"{TITLES[metric]}, {regime}", *(_horizon(k) for k in horizons)], rows)


def differences_table(differences: Sequence[Difference]) -> str:
    """Render differences over all horizons, in units of the metric; with several seeds, each seed's too."""
    rows = []
    for d in differences:
        if d.horizon == ALL:
            rows.append([d.arm, d.regime, TITLES[d.metric], str(d.windows), *difference_cells(d, d.metric)])
    return table(["Arm - reference", "Context", "Metric", "n", "Difference", *DIFFERENCE_HEADER], rows)


DIFFERENCE_HEADER = ("95 %", "by seed", "a difference")


def difference_cells(d: SeedDifference, metric: str) -> list[str]:
    """Return the difference and the cells below DIFFERENCE_HEADER."""
    low, high, difference = (figure(metric, value, "+") for value in (d.low, d.high, d.difference))
    seeds = " ".join(figure(metric, value, "+") for value in d.by_seed)
    return [difference, f"{low} to {high}", seeds, "yes" if d.counts else "no"]


def _horizon(horizon: int | str) -> str:
    return "all horizons" if horizon == ALL else f"horizon {horizon}"


def plot_study(path: Path, means: Sequence[Mean], differences: Sequence[Difference]) -> None:
    """Plot EM and loss by horizon, and differences over all horizons with bounds, one row per context."""
    regimes = list(dict.fromkeys(m.regime for m in means))
    canvas = Figure(figsize=(18, 4.5 * len(regimes)), layout="constrained")
    axes = canvas.subplots(len(regimes), 4, squeeze=False)
    for row, regime in zip(axes, regimes, strict=True):
        for column, metric in enumerate(("em", "nats")):
            _plot_means(row[column], [m for m in means if (m.regime, m.metric) == (regime, metric)], metric, regime)
            chosen = [d for d in differences if (d.regime, d.metric, d.horizon) == (regime, metric, ALL)]
            plot_forest(row[2 + column], {d.arm: d for d in chosen})
            reference = chosen[0].reference if chosen else ""
            row[2 + column].set(title=f"minus {reference}: {TITLES[metric]}")
    save_figure(path, canvas)


def _plot_means(axes: Axes, means: Sequence[Mean], metric: str, regime: str) -> None:
    for arm in dict.fromkeys(m.arm for m in means):
        points = [(m.horizon, m.mean) for m in means if m.arm == arm and m.horizon != ALL]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=arm)
    axes.set(title=f"{TITLES[metric]}, {regime}", xlabel="horizon")
    axes.legend(fontsize="small")


def plot_forest(axes: Axes, differences: Mapping[str, SeedDifference]) -> None:
    """Plot one line per difference, the first on top: bounds (black if it counts) and a tick per seed."""
    for i, d in enumerate(differences.values()):
        axes.errorbar(
            d.difference, i, xerr=[[d.difference - d.low], [d.high - d.difference]], fmt="o", capsize=3,
            color="black" if d.counts else "gray",
        )  # fmt: skip
        axes.plot(d.by_seed, [i] * len(d.by_seed), "|", color="gray")
    axes.axvline(0, color="black", linewidth=0.5)
    axes.set_yticks(range(len(differences)), list(differences))
    axes.invert_yaxis()


Latents = Mapping[str, Mapping[str, Sequence[Mapping[str, Sequence[float]]]]]
"""Arm -> context -> one record per seed: mean and largest RMS of h_k by horizon."""


def latents_table(latents: Latents) -> str:
    """Render the mean over windows and seeds at some horizons, and the largest of all."""
    rows = []
    for arm, regimes in latents.items():
        for regime, seeds in regimes.items():
            last = len(seeds[0]["mean"]) - 1
            shown = sorted({k for k in (0, 1, 5, 10, 20, 50) if k < last} | {last})
            cells = [f"{k}: {_average([s['mean'][k] for s in seeds]):.2f}" for k in shown]
            rows.append([arm, regime, ", ".join(cells), f"{max(max(s['largest']) for s in seeds):.2f}"])
    return table(["Arm", "Context", "RMS of h_k by horizon", "largest"], rows)


def plot_latents(path: Path, latents: Latents) -> None:
    regimes = list(next(iter(latents.values())))
    canvas = Figure(figsize=(6 * len(regimes), 4), layout="constrained")
    for axes, regime in zip(canvas.subplots(1, len(regimes), squeeze=False)[0], regimes, strict=True):
        for arm, by_context in latents.items():
            axes.plot(np.mean([seed["mean"] for seed in by_context[regime]], axis=0), label=arm)
        axes.set(title=f"RMS of h_k ({regime})", xlabel="horizon")
        axes.legend(fontsize="small")
    save_figure(path, canvas)


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)
