"""Metrics against cases computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from eval.scores.metrics import (
    METRICS,
    Metric,
    corpus_bleu4,
    entity_scores,
    exact_match,
    is_answerable,
    known_names,
    score_item,
    sentence_bleu4,
    token_f1,
)
from eval.scores.predictions import Prediction
from eval.scores.rows import Item, make_rows, score_window, summarize, summarize_pairs
from eval.scores.tables import four_cell
from loopwm.records.names import NameList
from loopwm.records.template import ContextKind, window_context
from loopwm.records.windows import COUNTERFACT, FACT, Window
from tests.fixtures.windows import MakeWindow


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("The door\n is  open. ", "The door is open.", 1),
        ("x\u00a0①", "x 1", 1),  # NFKC
        ("the door is open.", "The door is open.", 0),
        ("", " ", 1),
    ],
)
def test_exact_match_ignores_only_white_space_and_compatibility_forms(
    prediction: str, reference: str, expected: int
) -> None:
    assert exact_match(prediction, reference) == expected


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("The door is now open.", "door is closed", 4 / 7),  # 2 common of 4 and 3
        ("a apple, an apple", "apple", 2 / 3),  # bags: 1 common of 2 and 1
        ("10 degrees", "12 degrees", 1 / 2),
        ("the", "a", 1),  # nothing left of either
        ("", "door", 0),
    ],
)
def test_token_f1_is_squads(prediction: str, reference: str, expected: float) -> None:
    assert token_f1(prediction, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("the door is now open", "the door is now closed", (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25),
        ("the door is now", "the door is now open", math.exp(1 - 5 / 4)),  # brevity
        ("water", "water", 1),  # effective order
        ("a b", "c d", 0),
        ("a b c d", "a b d c", 0),  # no smoothing: no common 3-gram
        ("", "", 1),
        ("", "a", 0),
    ],
)
def test_bleu4_is_unsmoothed_with_effective_order(prediction: str, reference: str, expected: float) -> None:
    assert sentence_bleu4(prediction, reference) == pytest.approx(expected)


def test_corpus_bleu_pools_counts() -> None:
    assert corpus_bleu4(["a b c d", "x"], ["a b c d", "y"]) == pytest.approx((4 / 5) ** 0.25)


@pytest.mark.parametrize(
    ("env", "prediction", "reference", "expected"),
    [
        ("scienceworld", "an apple in the bowl", "a red apple in the bowl", (1 / 2, 1 / 2, 1 / 2)),
        ("scienceworld", "a bowl, a stove, a table", "a bowl", (1, 1 / 3, 1 / 2)),
        ("scienceworld", "Nothing happens.", "That is unclear.", (1, 1, 1)),
        ("scienceworld", "Nothing happens.", "a bowl", (0, 0, 0)),
        ("scienceworld", "a bowl", "Nothing happens.", (0, 0, 0)),
        ("alfworld", "You put the mug 2 in desk 1.", "You put the mug 1 in desk 1.", (1 / 2, 1 / 2, 1 / 2)),
    ],
)  # fmt: skip
def test_entity_scores_compare_sets_of_names(
    env: str, prediction: str, reference: str, expected: tuple[float, float, float]
) -> None:
    assert entity_scores(env, prediction, reference) == pytest.approx(expected)


def test_names_match_longest_first_by_whole_words_and_not_over_punctuation() -> None:
    names = NameList(["apple", "red apple", "apple tree", "unknown substance b"])
    assert names.longest("a Red  apple, pineapples") == {"red apple"}
    assert names.longest("red, apple") == {"apple"}
    assert names.longest("a red apple tree") == {"red apple"}  # from left to right
    assert names.longest("unknown substance B") == {"unknown substance b"}
    assert names.anywhere("a red apple tree") == {"red apple", "apple", "apple tree"}


@pytest.mark.parametrize(
    ("reference", "actions", "context_kind", "expected"),
    [
        ("The stove is now activated.", ["activate stove"], "observed", True),  # named by the action
        ("You see a stove.", ["look around"], "observed", False),  # shown only by look
        ("You see a stove.", ["look around"], "snapshot", True),
        ("You see a fridge.", ["look around"], "observed", True),  # seen in the history
        ("You move the apple to the inventory.", ["pick up"], "snapshot", True),  # inside `red apple`
        ("You move the glass cup to the sink.", ["move cup to sink"], "snapshot", False),
        ("the thermometer measures 71 degrees", ["use thermometer"], "observed", True),  # readings do not matter
        ("No known action matches that input.", ["dance"], "observed", True),  # no names
    ],
)
def test_answerable_means_every_name_was_met_before(
    make_window: MakeWindow, reference: str, actions: list[str], context_kind: str, expected: bool
) -> None:
    texts = window_context(make_window(), context_kind).texts  # type: ignore[arg-type]
    known = known_names("scienceworld", texts)
    assert is_answerable("scienceworld", reference, known, actions) is expected


def test_deferred_observations_do_not_make_later_steps_answerable(make_window: MakeWindow) -> None:
    window = make_window(actions=["look around", "wait1"], observations=["You see a jug.", "You see a jug."])
    items = list(score_window(window, "observed", Prediction({1: "", 2: ""})))
    assert [item.answerable for item in items] == [False, False]


def test_later_actions_do_not_make_an_answer_answerable(make_window: MakeWindow) -> None:
    window = make_window(actions=["look around", "take jug"], observations=["You see a jug.", "You take the jug."])
    items = list(score_window(window, "observed", Prediction({1: "", 2: ""})))
    assert [item.answerable for item in items] == [False, True]


def test_pairs_are_scored_at_their_last_action_only(make_window: MakeWindow) -> None:
    windows = [make_window(f"w/1{end}") for end in (FACT, COUNTERFACT)]

    def items_of(horizons: range) -> list[Item]:
        return [item for w in windows for item in score_window(w, "observed", Prediction(dict.fromkeys(horizons, "")))]

    pairs = summarize_pairs(items_of(range(1, 6)))
    assert pairs is not None
    assert pairs["n"] == 1
    assert summarize_pairs(items_of(range(1, 5))) is None


def test_a_perfect_model_scores_one_everywhere(make_window: MakeWindow) -> None:
    windows = [make_window(f"w{i}", family=family) for i, family in enumerate(("Boil", "Boil", "Melt"))]
    items = []
    for window in windows:
        items += score_window(window, "snapshot", Prediction(dict(enumerate(window["observations"], start=1))))
    rows = make_rows(items, [1, 2, 3, 4, 5])
    assert len(rows) == 3 * 5
    for row in rows:
        assert [row[name] for name in METRICS] == [1.0] * len(METRICS)
        assert row["bleu4_corpus"] == 1.0
        low = row["n"] / (row["n"] + 1.96**2)
        assert all(bounds[1] == 1.0 for bounds in row["ci95"].values())
        assert row["ci95"]["em"][0] == pytest.approx(low, abs=1e-4)
    assert [row["n"] for row in rows if row["horizon"] == 1] == [3, 2, 1]


def test_changed_splits_by_what_copy_would_say(make_window: MakeWindow) -> None:
    repeated = make_window("same", observations=["The fridge is now  open."] * 5)
    items = [
        item for window in (repeated, make_window("other"))
        for item in score_window(window, "observed", Prediction({1: "The fridge is now open."}))
    ]  # fmt: skip
    row = make_rows(items, [1])[0]
    assert (row["n_changed"], row["em_changed"], row["n_unchanged"], row["em_unchanged"]) == (1, 0.0, 1, 1.0)


def test_score_item_fills_every_metric() -> None:
    scores = score_item("scienceworld", "The door is now open.", "The door is now closed.")
    assert scores["em"] == 0
    assert scores["f1"] == pytest.approx(3 / 4)
    assert scores["entity_recall"] == 1


def test_environments_without_known_names_have_no_entity_metrics(make_window: MakeWindow) -> None:
    window = make_window(env="nethack")
    items = list(score_window(window, "observed", Prediction({1: window["observations"][0]})))
    row = make_rows(items, [1])[0]
    assert (row["em"], row["n_decidable"]) == (1.0, 0)
    assert not any(name.startswith("entity") for name in (*row, *row["ci95"]))
    assert four_cell(row) == "100.0 / 100.0 / 100.0 / -"


def test_standard_errors_are_of_the_mean_and_absent_for_one_item(make_window: MakeWindow) -> None:
    texts = ["You move to the hallway.", "x", "y", "z"]
    predicted = [(make_window(f"w{i}"), Prediction({1: text})) for i, text in enumerate(texts)]
    items = [item for window, prediction in predicted for item in score_window(window, "observed", prediction)]
    row = summarize(items)
    assert row["em"] == 0.25
    assert row["stderr"]["em"] == pytest.approx((0.25 * 0.75 / 3) ** 0.5)
    assert row["stderr"].keys() == row["ci95"].keys()
    assert summarize(items[:1])["stderr"] == {}


def test_refusals_are_recognised_by_their_text(make_window: MakeWindow) -> None:
    refused = "No known action matches that input."
    said = [refused, refused, "You move to the hallway.", "You move to the kitchen.", "The door is now open."]
    true = [refused, "You move to the hallway.", refused, "You move to the hallway.", "The door is already open."]
    items = []
    for i, (prediction, reference) in enumerate(zip(said, true, strict=True)):
        window = make_window(f"w{i}", observations=[reference] * 5)
        items += score_window(window, "observed", Prediction({1: prediction}))
    row = summarize(items)
    assert row["refusal"] == {"n": 2, "predicted": 2, "precision": 0.5, "recall": 0.5, "f1": 0.5}


def test_windows_of_one_game_count_once_in_intervals(make_window: MakeWindow) -> None:
    def row(variations: list[int]) -> dict[str, Any]:
        windows = [make_window(f"w{i}", variation=v) for i, v in enumerate(variations)]
        predicted = [Prediction({1: w["observations"][0] if w["variation"] % 2 else "x"}) for w in windows]
        return summarize([i for pair in zip(windows, predicted, strict=True) for i in score_window(*_shown(*pair))])

    few, many = row([i // 8 for i in range(80)]), row(list(range(80)))
    assert (few["games"], many["games"], few["em"], many["em"]) == (10, 80, 0.5, 0.5)
    width = [high - low for low, high in (few["ci95"]["em"], many["ci95"]["em"])]
    assert width[0] > 2 * width[1]
    assert few["stderr"]["em"] > 2 * many["stderr"]["em"]


def _shown(window: Window, prediction: Prediction) -> tuple[Window, ContextKind, Prediction]:
    return window, "observed", prediction


def test_a_metric_from_outside_is_scored_and_shown(make_window: MakeWindow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "length", Metric("Length", lambda env, prediction, reference: len(prediction) / 100))
    items = list(score_window(make_window(), "observed", Prediction({1: "x" * 50})))
    assert make_rows(items, [1])[0]["length"] == 0.5
