"""What a report says about runs beyond the rows of their results: splits, pairs, differences, the worst."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from eval.bootstrap import interval95
from eval.compare import Difference, paired_difference
from eval.reports.runs import Run
from eval.scoring import Item

LENGTHS = (5, 10, 20, 40, 80)
"""Upper bounds of the classes of observation length, in words; the last class is open."""

FACT, COUNTERFACT = "/fact", "/counterfact"
"""Endings of the ids of a pair's windows."""


@dataclass(frozen=True)
class Mean:
    """A share of n items with bootstrap 95 % bounds."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Pairs:
    """Counterfactual pairs: both windows right, each right, and the same prediction for both."""

    both: Mean
    fact: Mean
    counterfact: Mean
    same: Mean


def mean(values: Iterable[float]) -> Mean | None:
    """None over nothing."""
    array = np.array(list(values), dtype=np.float64)
    if not len(array):
        return None
    low, high = interval95(array[:, None])[:, 0].tolist()
    return Mean(float(array.mean()), low, high, len(array))


def em_where(items: Iterable[Item], chosen: Callable[[Item], bool]) -> Mean | None:
    return mean(item.scores.em for item in items if chosen(item))


def length_class(text: str) -> int:
    """Index of the class of a text's number of words."""
    words = len(text.split())
    return next((i for i, bound in enumerate(LENGTHS) if words <= bound), len(LENGTHS))


def length_names() -> list[str]:
    lows = [0, *(bound + 1 for bound in LENGTHS)]
    return [*(f"{low}-{high}" for low, high in zip(lows, LENGTHS, strict=False)), f"{lows[-1]}+"]


def em_by_length(items: Sequence[Item]) -> list[Mean | None]:
    """EM for each class of length of the true observation."""
    classes = range(len(LENGTHS) + 1)
    return [em_where(items, lambda item, c=c: length_class(item.reference) == c) for c in classes]  # type: ignore[misc]


def counterfactual_pairs(run: Run) -> Pairs | None:
    """At the last action of each window, which alone is known to come out otherwise. None if the run has no pairs."""
    ends = {window["id"]: len(window["actions"]) for window in run.suite.windows}
    items = {item.window_id: item for item in run.items if item.horizon == ends[item.window_id]}
    facts = [name for name in items if name.endswith(FACT)]
    others = {name: name.removesuffix(FACT) + COUNTERFACT for name in facts}
    pairs = [(items[name], items[other]) for name, other in others.items() if other in items]
    if not pairs:
        return None
    em = np.array([[a.scores.em, b.scores.em] for a, b in pairs])
    same = [float(a.prediction == b.prediction) for a, b in pairs]
    found = [mean(values) for values in (em.min(axis=1), em[:, 0], em[:, 1], same)]
    return Pairs(*(m for m in found if m is not None))


def difference(run: Run, reference: Run, metric: str, horizon: int) -> Difference | None:
    """run - reference, paired over the windows that both have at that horizon; None if they share none."""
    a, b = ({item.window_id: getattr(item.scores, metric) for item in r.at(horizon)} for r in (run, reference))
    shared = sorted(a.keys() & b.keys())
    if not shared:
        return None
    scores_a, scores_b = (np.array([scores[name] for name in shared], dtype=np.float64) for scores in (a, b))
    return paired_difference(metric, horizon, scores_a, scores_b)


def worst(items: Iterable[Item], count: int) -> list[Item]:
    """The lowest token F1, the longer observation first among equals."""
    wrong = [item for item in items if item.scores.em < 1]
    return sorted(wrong, key=lambda i: (i.scores.f1, -len(i.reference), i.window_id, i.horizon))[:count]
