"""Aggregate predictions to rows: one a family and one overall, at each horizon."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.scores.intervals import Values, fraction_interval95, game_standard_errors
from eval.scores.metrics import METRICS, ItemScores, corpus_bleu4, exact_match, is_answerable, known_names, score_item
from eval.scores.predictions import Prediction
from eval.scores.seen import Seen
from loopwm.records.refusals import is_refused
from loopwm.records.template import ContextKind, window_context
from loopwm.records.windows import COUNTERFACT, FACT, Window, game_of, pair_of

OVERALL = "overall"
REWARD_TOLERANCE = 0.5
"""Points. Scores are whole numbers: a predicted reward counts as right if it rounds to the true one."""


@dataclass(frozen=True)
class Item:
    """One window at one horizon, predicted and scored.

    is_last: the horizon takes all the window's actions. in_training: the window occurs in train episodes, None if these
    are unknown. reward, end: (predicted, true), None if not predicted.
    """

    window_id: str
    game: str
    family: str
    horizon: int
    is_last: bool
    prediction: str
    reference: str
    scores: ItemScores
    changed: bool
    answerable: bool
    in_training: bool | None
    reward: tuple[float, float] | None
    end: tuple[bool, bool] | None


SPLITS: dict[str, Callable[[Item], bool]] = {
    "novel": lambda item: item.in_training is False,
    "seen": lambda item: item.in_training is True,
    "changed": lambda item: item.changed,
    "unchanged": lambda item: not item.changed,
    "decidable": lambda item: item.answerable,
}


def score_window(
    window: Window, context_kind: ContextKind, predicted: Prediction, seen_table: Seen | None = None
) -> Iterator[Item]:
    """Score the predictions of one window at each of their horizons."""
    env, last = window["env"], window["history"][-1]["observation"]
    known = known_names(env, window_context(window, context_kind).texts)
    for horizon, prediction in predicted.texts.items():
        at = horizon - 1
        reference = window["observations"][at]
        scores = score_item(env, prediction, reference)
        reward, end = predicted.rewards.get(horizon), predicted.ends.get(horizon)
        yield Item(
            window_id=window["id"],
            game=game_of(window),
            family=window["family"],
            horizon=horizon,
            is_last=horizon == len(window["actions"]),
            prediction=prediction,
            reference=reference,
            scores=scores,
            changed=not exact_match(last, reference),
            answerable=is_answerable(env, reference, known, window["actions"][:horizon]),
            in_training=None if seen_table is None else seen_table.at(window, horizon),
            reward=None if reward is None else (reward, window["rewards"][at]),
            end=None if end is None else (end, window["dones"][at]),
        )


def make_rows(items: Sequence[Item], horizons: Sequence[int]) -> list[dict[str, Any]]:
    """Return rows in the order overall, then families by name, each at every horizon."""
    families = [OVERALL, *sorted({item.family for item in items} - {OVERALL})]
    rows = []
    for family in families:
        for horizon in horizons:
            chosen = [i for i in items if i.horizon == horizon and family in (OVERALL, i.family)]
            rows.append({"family": family, "horizon": horizon, **summarize(chosen)})
    return rows


def summarize(items: Sequence[Item]) -> dict[str, Any]:
    """Return means over the items with 95 % intervals and standard errors over games; undefined figures are left out.

    n: items. games: number of their games. n_SPLIT, em_SPLIT: of the items of a split, if known. refusal, reward, end:
    see `detection` and `reward_accuracy`.
    """
    names = list(METRICS)
    scores = np.array([[item.scores[name] for name in names] for item in items])
    games = [item.game for item in items]
    row: dict[str, Any] = {"n": len(items), "games": len(set(games))}
    defined = [i for i in range(len(names)) if not np.isnan(scores[:, i]).any()]
    row |= estimates(scores[:, defined], games, [names[i] for i in defined])
    row["bleu4_corpus"] = corpus_bleu4([item.prediction for item in items], [item.reference for item in items])
    for name, belongs in SPLITS.items():
        if name in ("novel", "seen") and any(item.in_training is None for item in items):
            continue
        chosen = [item for item in items if belongs(item)]
        row[f"n_{name}"] = len(chosen)
        if chosen:
            em = np.array([[item.scores["em"]] for item in chosen])
            split_estimates = estimates(em, [item.game for item in chosen], (f"em_{name}",))
            row["ci95"] |= split_estimates.pop("ci95")
            row["stderr"] |= split_estimates.pop("stderr")
            row |= split_estimates
    row["refusal"] = detection([(is_refused(item.prediction), is_refused(item.reference)) for item in items])
    if ends := [item.end for item in items if item.end is not None]:
        row["end"] = detection(ends)
    if rewards := [item.reward for item in items if item.reward is not None]:
        row["reward"] = reward_accuracy(rewards)
    return row


def estimates(values: Values, games: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """Return means of the columns by name, with `ci95` and `stderr`. values: (n, names), fractions; games: of each row.

    One game has no standard error, and no interval unless all its values are 0 or all are 1.
    """
    bounds, errors = fraction_interval95(values, games), game_standard_errors(values, games)
    known = ~np.isnan(bounds[0])  # one game has no bounds
    return {
        **dict(zip(names, values.mean(axis=0).tolist(), strict=True)),
        "ci95": {name: bounds[:, i].tolist() for i, name in enumerate(names) if known[i]},
        "stderr": {} if errors is None else dict(zip(names, errors.tolist(), strict=True)),
    }


def detection(pairs: Sequence[tuple[bool, bool]]) -> dict[str, float | int]:
    """Return n (true), predicted, precision, recall and f1 of (predicted, true) pairs of a rare event.

    Precision is left out if none is predicted, recall if none is true, f1 if there is neither.
    """
    predicted, true = sum(p for p, _ in pairs), sum(t for _, t in pairs)
    hits = sum(p and t for p, t in pairs)
    figures: dict[str, float | int] = {"n": true, "predicted": predicted}
    parts = {"precision": (hits, predicted), "recall": (hits, true), "f1": (2 * hits, predicted + true)}
    return figures | {name: part / whole for name, (part, whole) in parts.items() if whole}


def reward_accuracy(pairs: Sequence[tuple[float, float]]) -> dict[str, float | int]:
    """Return the share of (predicted, true) rewards that agree, and of those that are not 0: most are 0."""
    right = [abs(predicted - true) < REWARD_TOLERANCE for predicted, true in pairs]
    paid = [hit for hit, (_, true) in zip(right, pairs, strict=True) if true != 0]
    figures: dict[str, float | int] = {"n": len(pairs), "accuracy": sum(right) / len(right), "n_nonzero": len(paid)}
    return figures | ({"accuracy_nonzero": sum(paid) / len(paid)} if paid else {})


def summarize_pairs(items: Sequence[Item]) -> dict[str, Any] | None:
    """Summarise counterfactual pairs at the last action of their windows, the only one whose answers differ.

    Shares of the n pairs: both windows right, each right, the same answer for both. None without pairs.
    """
    last = {item.window_id: item for item in items if item.is_last}
    facts = [item for name, item in last.items() if name.endswith(FACT)]
    pairs = [(a, last[b]) for a in facts if (b := pair_of(a.window_id) + COUNTERFACT) in last]
    if not pairs:
        return None
    games = [a.game for a, _ in pairs]
    rows = [
        (min(a.scores["em"], b.scores["em"]), a.scores["em"], b.scores["em"], a.prediction == b.prediction)
        for a, b in pairs
    ]
    figures = estimates(np.array(rows, dtype=np.float64), games, ("both", "fact", "counterfact", "same"))
    return {"n": len(pairs), "games": len(set(games)), **figures}
