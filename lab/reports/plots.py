"""Plots as SVG text for light and dark pages: ink is one grey, the background is transparent."""

from __future__ import annotations

import io
import re
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#7f7f80"
"""Colour of axes and text. A page that inlines the plot may replace it by its text colour."""

COLORS = ("#3d85c6", "#e0803a", "#43a366", "#c85fa5", "#8f76d6", "#b9962f", "#45a5a8", "#d4556a")
MARKERS = "os^DvPX*"
STYLE: Any = {
    "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "svg.hashsalt": "loopwm", "font.size": 9,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "grid.color": INK, "grid.alpha": 0.25, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "legend.frameon": False,
}  # fmt: skip


def make_canvas(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Create a figure of a size in inches, and its panels row by row."""
    canvas = Figure(figsize=(width, height), layout="constrained")
    panels = list(canvas.subplots(rows, columns, squeeze=False).flat)
    for transparent in (canvas, *panels):
        transparent.patch.set_alpha(0)
    return canvas, panels


def svg_text(canvas: Figure, name: str) -> str:
    """Return the <svg> element, sized by its viewBox, small, with ids prefixed by `name`."""
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<[^>]+>", lambda tag: _slim_tag(tag[0], name), text)
    return re.sub(r">\s+<", "><", text)


def _slim_tag(tag: str, name: str) -> str:
    """Round coordinates of a tag to a tenth; drop ids of groups and the size of the outer element."""
    tag = re.sub(r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", " ".join(tag.split()))
    if tag.startswith("<g"):
        return re.sub(r' id="[^"]*"', "", tag)
    if tag.startswith("<svg"):
        return re.sub(r' (width|height)="[^"]*"', "", tag)
    return re.sub(r'( id="|url\(#|href="#)', rf"\1{name}-", tag)
