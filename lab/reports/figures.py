"""Write plots to files; names and units of metrics in them."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.figure import Figure

from eval.scores.metrics import METRICS
from loopwm.records.files import write_atomic

TITLES = {**{name: metric.title for name, metric in METRICS.items()}, "nats": "Teacher-forced loss"}
UNITS = "EM and F1 are percent, losses nats an observation."


def save_figure(path: Path, canvas: Figure) -> None:
    """Write the PNG atomically."""
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=100)
    write_atomic(path, buffer.getvalue())


def in_points(difference: float, low: float, high: float) -> str:
    """Format a difference of shares in points with its interval."""
    return f"{100 * difference:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
