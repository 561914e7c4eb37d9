"""Plots as SVG text that suits a light and a dark page: ink is one grey, the background is transparent."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.reports.analysis import Share

INK = "#7f7f80"
"""Axes and text. A page that inlines the plot may put its own text colour in place of it."""

COLORS = ("#3d85c6", "#e0803a", "#43a366", "#c85fa5", "#8f76d6", "#b9962f", "#45a5a8", "#d4556a")
MARKERS = "os^DvPX*"
DASHES = ("-", "--", ":")
STYLE: Any = {
    "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "svg.hashsalt": "loopwm", "font.size": 9,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "grid.color": INK, "grid.alpha": 0.25, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "legend.frameon": False,
}  # fmt: skip


@dataclass(frozen=True)
class Look:
    """How one run is drawn: models differ in colour and marker, contexts in dashes."""

    color: str
    marker: str
    dash: str


@dataclass(frozen=True)
class Line:
    """means[i] belongs to the i-th place of the x axis; None leaves a gap."""

    label: str
    look: Look
    means: Sequence[Share | None]


PAPER = Look(INK, "x", "-.")


def look(model: int, context: int) -> Look:
    return Look(COLORS[model % len(COLORS)], MARKERS[model % len(MARKERS)], DASHES[context % len(DASHES)])


def plot_lines(name: str, x_label: str, y_label: str, ticks: Sequence[str], lines: Sequence[Line]) -> str:
    """Percent with bars for the 95 % bounds, a line a run. `name` makes the SVG's ids unique on a page."""
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
    """Places and bounds in percent, gaps between them: one path draws them all."""
    places = [place for x, _ in points for place in (x, x, math.nan)]
    bounds = [bound for _, m in points for bound in (100 * m.low, 100 * m.high, math.nan)]
    return places, bounds


def plot_splits(
    name: str, x_label: str, names: tuple[str, str], rows: Sequence[tuple[str, Share | None, Share | None]]
) -> str:
    """A row a run: the share for the first kind of item (filled) and for the second (hollow)."""
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


def make_canvas(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Inches. The panels row by row."""
    canvas = Figure(figsize=(width, height), layout="constrained")
    panels = list(canvas.subplots(rows, columns, squeeze=False).flat)
    for transparent in (canvas, *panels):
        transparent.patch.set_alpha(0)
    return canvas, panels


def svg_text(canvas: Figure, name: str) -> str:
    """The <svg> element, sized by its viewBox, small, with the ids that it refers to led by `name`."""
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<[^>]+>", lambda tag: _slim_tag(tag[0], name), text)
    return re.sub(r">\s+<", "><", text)


def _slim_tag(tag: str, name: str) -> str:
    """A tag with coordinates to a tenth; groups lose their ids, the outer element its size."""
    tag = re.sub(r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", " ".join(tag.split()))
    if tag.startswith("<g"):
        return re.sub(r' id="[^"]*"', "", tag)
    if tag.startswith("<svg"):
        return re.sub(r' (width|height)="[^"]*"', "", tag)
    return re.sub(r'( id="|url\(#|href="#)', rf"\1{name}-", tag)
