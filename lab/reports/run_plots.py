"""Plots of runs: means with bounds, one line or row per run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes

from lab.reports.analysis import Share
from lab.reports.plots import COLORS, INK, MARKERS, STYLE, make_canvas, svg_text

DASHES = ("-", "--", ":")


@dataclass(frozen=True)
class Look:
    """Style of one run: models differ in colour and marker, contexts in dashes."""

    color: str
    marker: str
    dash: str


@dataclass(frozen=True)
class Line:
    """Line of a plot. means[i] belongs to the i-th tick of the x axis; None leaves a gap."""

    label: str
    look: Look
    means: Sequence[Share | None]


PAPER = Look(INK, "x", "-.")


def look(model: int, context: int) -> Look:
    return Look(COLORS[model % len(COLORS)], MARKERS[model % len(MARKERS)], DASHES[context % len(DASHES)])


def plot_lines(name: str, x_label: str, y_label: str, ticks: Sequence[str], lines: Sequence[Line]) -> str:
    """Plot percentages with 95 % bars, one line per run. `name` makes the SVG's ids unique on a page."""
    with mpl.rc_context(STYLE):
        canvas, (axes,) = make_canvas(5.4, 3.1 + 0.17 * -(-len(lines) // 2))
        for i, line in enumerate(lines):
            _draw_line(axes, line, (i - (len(lines) - 1) / 2) * 0.4 / max(len(lines), 1))
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set_xlabel(x_label)
        axes.set_ylabel(f"{y_label}, %")
        canvas.legend(loc="outside lower center", ncols=2, fontsize=8)
        return svg_text(canvas, name)


def _draw_line(axes: Axes, line: Line, shift: float) -> None:
    points = [(i + shift, m) for i, m in enumerate(line.means) if m is not None]
    x, look = [x for x, _ in points], line.look
    y = [100 * m.value for _, m in points]
    axes.plot(x, y, look.dash, color=look.color, marker=look.marker, ms=4, lw=1.3, label=line.label, clip_on=False)
    axes.plot(*_bars(points), color=look.color, lw=0.8, clip_on=False)


def _bars(points: Sequence[tuple[float, Share]]) -> tuple[list[float], list[float]]:
    """Return places and bounds in percent, separated by gaps so that one path draws them all."""
    places = [place for x, _ in points for place in (x, x, math.nan)]
    bounds = [bound for _, m in points for bound in (100 * m.low, 100 * m.high, math.nan)]
    return places, bounds


def plot_splits(
    name: str, x_label: str, names: tuple[str, str], rows: Sequence[tuple[str, Share | None, Share | None]]
) -> str:
    """Plot one row per run: the share of the first kind of item (filled) and of the second (hollow)."""
    with mpl.rc_context(STYLE):
        canvas, (axes,) = make_canvas(5.4, 1.3 + 0.3 * len(rows))
        for kind, (label, fill, color) in enumerate(zip(names, (COLORS[0], "none"), COLORS, strict=False)):
            _draw_dots(axes, [(row[1], row[2])[kind] for row in rows], label, fill, color)
        axes.set_yticks(range(len(rows)), [row[0] for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(-3, 103)
        axes.set_xlabel(f"{x_label}, %")
        canvas.legend(loc="outside lower center", ncols=2, fontsize=8)
        return svg_text(canvas, name)


def _draw_dots(axes: Axes, means: Sequence[Share | None], label: str, fill: str, color: str) -> None:
    points = [(float(i), m) for i, m in enumerate(means) if m is not None]
    x, y = [100 * m.value for _, m in points], [i for i, _ in points]
    places, bounds = _bars(points)
    axes.plot(bounds, places, color=color, lw=1)
    axes.plot(x, y, "o", ms=6, color=color, markerfacecolor=fill, label=label)
