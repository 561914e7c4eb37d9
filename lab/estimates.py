"""Means over games with their bounds."""

from __future__ import annotations

from typing import Any

from eval.scores.intervals import Values, interval95


def estimate(values: Values) -> dict[str, Any]:
    """Return mean and bounds of one value a game, as results hold them. values: (n,), n >= 1."""
    return {"mean": float(values.mean()), "ci95": interval95(values[:, None])[:, 0].tolist()}
