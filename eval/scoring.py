"""From predictions to rows: one row a family and one overall, at each horizon."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np

from eval.bootstrap import interval95
from eval.metrics import (
    ItemScores,
    context_texts,
    corpus_bleu4,
    exact_match,
    is_decidable,
    known_names,
    score_item,
)
from eval.windows import Window
from loopwm.text.format import Regime, window_context

OVERALL = "overall"
METRICS = tuple(field.name for field in fields(ItemScores))


@dataclass(frozen=True)
class Item:
    """One window at one horizon, predicted and scored."""

    window_id: str
    family: str
    horizon: int
    prediction: str
    reference: str
    scores: ItemScores
    changed: bool
    decidable: bool


def score_window(window: Window, regime: Regime, predictions: dict[int, str]) -> Iterator[Item]:
    """Scores the predictions (by horizon) of one window."""
    env, last = window["env"], window["history"][-1]["observation"]
    known = known_names(env, context_texts(window_context(window, regime)))
    for horizon, prediction in predictions.items():
        reference = window["observations"][horizon - 1]
        yield Item(
            window_id=window["id"],
            family=window["family"],
            horizon=horizon,
            prediction=prediction,
            reference=reference,
            scores=score_item(env, prediction, reference),
            changed=not exact_match(last, reference),
            decidable=is_decidable(env, reference, known, window["actions"][:horizon]),
        )


def make_rows(items: Sequence[Item], horizons: Sequence[int]) -> list[dict[str, Any]]:
    """Rows in the order overall, then families by name, each at every horizon."""
    families = [OVERALL, *sorted({item.family for item in items} - {OVERALL})]
    rows = []
    for family in families:
        for horizon in horizons:
            chosen = [i for i in items if i.horizon == horizon and family in (OVERALL, i.family)]
            rows.append({"family": family, "horizon": horizon, **summarize(chosen)})
    return rows


def summarize(items: Sequence[Item]) -> dict[str, Any]:
    """Means over the items with 95 % intervals and standard errors; what is over no items or undefined is left out."""
    scores = np.array([astuple(item.scores) for item in items], dtype=np.float64)
    decidable = np.array([item.decidable for item in items])
    changed = np.array([item.changed for item in items])
    row: dict[str, Any] = {"n": len(items)}
    defined = [i for i in range(len(METRICS)) if not np.isnan(scores[:, i]).any()]
    names = [METRICS[i] for i in defined]
    row |= dict(zip(names, scores[:, defined].mean(axis=0).tolist(), strict=True))
    row["bleu4_corpus"] = corpus_bleu4([item.prediction for item in items], [item.reference for item in items])
    row |= {"changed_share": float(changed.mean()), "decidable_share": float(decidable.mean())}
    row["ci95"] = _intervals(scores[:, defined], names)
    row["stderr"] = _standard_errors(scores[:, defined], names)
    em = scores[:, :1]
    for name, subset in (("em_changed", changed), ("em_unchanged", ~changed), ("em_decidable", decidable)):
        if subset.any():
            row[name] = float(em[subset].mean())
            row["ci95"] |= _intervals(em[subset], (name,))
            row["stderr"] |= _standard_errors(em[subset], (name,))
    return row


def _intervals(values: np.ndarray, names: Sequence[str]) -> dict[str, list[float]]:
    return dict(zip(names, interval95(values).T.tolist(), strict=True))


def _standard_errors(values: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Of the means of the columns; one item has none."""
    if len(values) < 2:
        return {}
    errors = values.std(axis=0, ddof=1) / np.sqrt(len(values))
    return dict(zip(names, errors.tolist(), strict=True))
