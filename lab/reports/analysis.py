"""Statistics of runs beyond the rows of their results: splits, differences, worst predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.scores.intervals import PairedDifference, paired_difference
from eval.scores.rows import Item, estimates
from lab.reports.runs import Run

LENGTHS = (5, 10, 20, 40, 80)
"""Upper bounds of observation lengths in words; the last class is open."""


@dataclass(frozen=True)
class Share:
    """Share of n items with 95 % bounds over games, NaN if there are none."""

    value: float
    low: float
    high: float
    n: int


def mean_of(row: Mapping[str, Any], name: str, n: int) -> Share | None:
    """Return a figure of a results row over n items; None if the row lacks it."""
    if name not in row:
        return None
    low, high = row["ci95"].get(name, (math.nan, math.nan))
    return Share(row[name], low, high, n)


def em_where(items: Iterable[Item], chosen: Callable[[Item], bool]) -> Share | None:
    """Return the EM of the chosen items, None if there are none."""
    rest = [item for item in items if chosen(item)]
    if not rest:
        return None
    em = np.array([[item.scores["em"]] for item in rest])
    return mean_of(estimates(em, [item.game for item in rest], ("em",)), "em", len(rest))


def length_class(text: str) -> int:
    """Return the length class of a text."""
    words = len(text.split())
    return next((i for i, bound in enumerate(LENGTHS) if words <= bound), len(LENGTHS))


def length_names() -> list[str]:
    lows = [0, *(bound + 1 for bound in LENGTHS)]
    return [*(f"{low}-{high}" for low, high in zip(lows, LENGTHS, strict=False)), f"{lows[-1]}+"]


def em_by_length(items: Sequence[Item]) -> list[Share | None]:
    """Return the EM for each length class of the true observation."""
    classes = range(len(LENGTHS) + 1)
    return [em_where(items, lambda item, c=c: length_class(item.reference) == c) for c in classes]  # type: ignore[misc]


def difference(run: Run, reference: Run, metric: str, horizon: int) -> PairedDifference | None:
    """Return run - reference, paired over common windows at that horizon; None if they share none."""
    a, b = ({item.window_id: item for item in r.at(horizon)} for r in (run, reference))
    shared = sorted(a.keys() & b.keys())
    if not shared:
        return None
    scores_a, scores_b = (np.array([r[name].scores[metric] for name in shared]) for r in (a, b))
    return paired_difference(metric, horizon, scores_a, scores_b, [a[name].game for name in shared])


def worst(items: Iterable[Item], count: int) -> list[Item]:
    """Return the items of lowest token F1, longer observations first among ties."""
    wrong = [item for item in items if item.scores["em"] < 1]
    return sorted(wrong, key=lambda i: (i.scores["f1"], -len(i.reference), i.window_id, i.horizon))[:count]
