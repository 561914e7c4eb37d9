"""Score one predicted observation against the true one (metrics-v1). Every figure is a fraction in [0, 1].

EM                 equal after NFKC, white space squeezed and stripped.
Token F1           SQuAD 1.1: lower case, no punctuation, no articles; F1 of the bags of words. Both empty: 1.
BLEU-4             sacrebleu sentence BLEU, tokenizer 13a, effective order, no smoothing. Both empty: 1.
Entity R / P / F1  of the set of names (`names_of`) in the prediction against that in the reference.
                   Both empty: 1; only one of them empty: 0. The papers' "Entity" behaves like recall.
                   NaN in environments whose names are not known; there nothing is answerable.
changed            the reference differs from the last observation of the history, which `copy` repeats (not EM).
answerable         the reference names only things known before; see `is_answerable`.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from sacrebleu.metrics import BLEU

from data_prep.environments import declared
from loopwm.records.names import Names

DATA = Path(__file__).parents[1] / "data"


def names_of(env: str) -> Names | None:
    """Return names of an environment's things, the basis of the entity metrics and the answerable rule.

    Environments declare them (`data_prep/environments/base.py:Declared`). One that does not, None, has no entity
    metrics.
    """
    return declared(env).names


METRICS_VERSION = "metrics-v1"

ALWAYS_KNOWN = frozenset({"agent", "inventory", "air"})

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())


def exact_match(prediction: str, reference: str) -> float:
    return float(normalize(prediction) == normalize(reference))


def squad_tokens(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def token_f1(prediction: str, reference: str) -> float:
    predicted, expected = squad_tokens(prediction), squad_tokens(reference)
    if not predicted or not expected:
        return float(predicted == expected)
    common = (Counter(predicted) & Counter(expected)).total()
    return 2 * common / (len(predicted) + len(expected))


@cache
def _bleu() -> BLEU:
    return BLEU(tokenize="13a", smooth_method="none", effective_order=True)


def sentence_bleu4(prediction: str, reference: str) -> float:
    if not prediction.strip() and not reference.strip():
        return 1.0
    return min(1.0, _bleu().sentence_score(prediction, [reference]).score / 100)  # rounding may exceed 100


def corpus_bleu4(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return BLEU-4 of counts pooled over all items; otherwise as the sentence score."""
    return min(1.0, _bleu().corpus_score(list(predictions), [list(references)]).score / 100)


@lru_cache(maxsize=8)  # cached: three metrics need the same result
def entity_scores(env: str, prediction: str, reference: str) -> tuple[float, float, float]:
    """Return recall, precision and F1 of the reference's set of names."""
    names = names_of(env)
    if names is None:
        return math.nan, math.nan, math.nan
    predicted, expected = names.named(prediction), names.named(reference)
    if not predicted or not expected:
        same = float(predicted == expected)
        return same, same, same
    common = len(predicted & expected)
    recall, precision = common / len(expected), common / len(predicted)
    return recall, precision, 2 * common / (len(expected) + len(predicted))


def _entity(part: int) -> Callable[[str, str, str], float]:
    return lambda env, prediction, reference: entity_scores(env, prediction, reference)[part]


@dataclass(frozen=True)
class Metric:
    """One metric.

    score: of environment, prediction and reference, in [0, 1]; NaN if undefined. headline: shown in every table.
    """

    title: str
    score: Callable[[str, str, str], float]
    headline: bool = False


METRICS = {
    "em": Metric("EM", lambda env, prediction, reference: exact_match(prediction, reference), True),
    "f1": Metric("Token F1", lambda env, prediction, reference: token_f1(prediction, reference), True),
    "bleu4": Metric("BLEU-4", lambda env, prediction, reference: sentence_bleu4(prediction, reference), True),
    "entity_recall": Metric("Entity recall", _entity(0), True),
    "entity_precision": Metric("Entity precision", _entity(1)),
    "entity_f1": Metric("Entity F1", _entity(2)),
}
"""Metrics by their name in results. Tables, plots, comparisons and lm-evaluation-harness follow it."""

HEADLINE = tuple(name for name, metric in METRICS.items() if metric.headline)

ItemScores = dict[str, float]
"""Scores of one window at one horizon, by metric."""


def score_item(env: str, prediction: str, reference: str) -> ItemScores:
    return {name: metric.score(env, prediction, reference) for name, metric in METRICS.items()}


def known_names(env: str, texts: Iterable[str]) -> frozenset[str]:
    """Return every name in the texts, also inside longer names."""
    names = names_of(env)
    return frozenset(name for text in texts for name in names.mentioned(text)) if names else frozenset()


def is_answerable(env: str, reference: str, known: frozenset[str], actions: Sequence[str]) -> bool:
    """Return True if the reference names only things observed, opened or moved before.

    The names of the reference (its entities, longest match) must each occur in the context as its kind shows it
    (goal, history, and look, inventory, hidden state where shown; `known`), or in one of the actions up to and with
    the scored one: what an action opens, moves or goes to is named by it. Inside a longer name counts: `apple` is
    known once `red apple` was seen. Deferred observations are not shown, so what they would have revealed is unknown.
    The agent itself, its inventory and the air around it are known always. The rule is about names alone: a reading
    (`10 degrees`) or a state (`is now open`) does not make a window unanswerable, and a reference without names is
    answerable. Answerable means that no name is new, not that the answer can be derived.

    Checked by hand on 100 dev items of ScienceWorld, half of them answerable. The first 50 led to the exemption of the
    inventory and one known miss (`parrot egg` after `focus on egg parrot`); the other 50 matched a reader's judgement.
    """
    names = names_of(env)
    return names is not None and names.named(reference) <= known | known_names(env, actions) | ALWAYS_KNOWN
