"""The rule of error kinds, by case and against 50 errors of baselines on dev windows, labelled by reading them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.reports.error_kinds import error_kind
from loopwm.records.refusals import is_refused

ITEMS = Path(__file__).parent / "data" / "error_kinds.jsonl"
MISSED = {"a ceramic cup (containing flour, a substance called water)"}
"""Two things in a cup for two others: the rule sees other names, a reader another list."""


def test_the_rule_names_errors_as_a_reader_does_but_for_one_known_miss() -> None:
    items = [json.loads(line) for line in ITEMS.read_text().splitlines()]
    assert len({(item["prediction"], item["reference"]) for item in items}) == 50
    found = [error_kind(item["env"], item["prediction"], item["reference"], item["last"]) for item in items]
    missed = [item for item, kind in zip(items, found, strict=True) if kind != item["kind"]]
    assert {item["reference"] for item in missed} == MISSED


@pytest.mark.parametrize(
    ("prediction", "reference", "kind"),
    [
        ("You arrive at drawer 1. The drawer 1 is closed.",
         "You arrive at drawer 1. The drawer 1 is open. In it, you see a pen 1.", "state"),
        ("On the desk 1, you see a mug 1.", "On the desk 1, you see nothing.", "list"),
        ("On the desk 1, you see a mug 1.", "On the desk 1, you see a mug 2.", "name"),
        ("You pick up the mug 1 from the desk 1.", "Nothing happens.", "refusal"),
        ("You turn on the desklamp 1.", "You close the drawer 1.", "other"),
        ("You turn on the desklamp 1.", "You turn on the desklamp 2.", "name"),
    ],
)  # fmt: skip
def test_alfworlds_errors(prediction: str, reference: str, kind: str) -> None:
    assert error_kind("alfworld", prediction, reference, "") == kind
    assert error_kind("alfworld", reference, prediction, "") == kind


@pytest.mark.parametrize(
    ("prediction", "reference", "kind"),
    [
        ("a plane, with: a brick approximately 98% down the plane", "a plane, with: a brick at the bottom of the plane",
         "reading"),
        ("The door is now open.", "The door is already open.", "state"),
        ("The stove is now activated.", "The stove appears broken, and can't be activated or deactivated.", "state"),
        ("You move the pea to the flower pot 3.", "You move the pea to the flower pot 4.", "name"),
        ("No known action matches that input.", "It's not clear how to get there from here.", "refusal"),
        ("You wait.", "Ambiguous request: Please enter the number\n0:\tgo", "refusal"),
        ("solid ice cream", "liquid ice cream", "other"),
        ("solid ice cream", "liquid soap", "name"),
        ("You move to the kitchen.", "You move to the hallway.", "repetition"),
        ("a red box and a red box and a red box and a red box and a", "a red box", "repetition"),
    ],
)  # fmt: skip
def test_scienceworlds_errors(prediction: str, reference: str, kind: str) -> None:
    assert error_kind("scienceworld", prediction, reference, "You move to the  kitchen.") == kind


def test_a_reading_that_stands_still_is_a_reading_and_no_repetition() -> None:
    last = "the thermometer measures a temperature of 10 degrees celsius"
    assert error_kind("scienceworld", last, last.replace("10", "-3"), last) == "reading"


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("No known action matches that input.", True),
        ("Nothing happens.", True),
        ("The painting is not openable.", True),
        ("The door is not open.", False),
        ("Ambiguous request: Please enter the number", False),
        ("You move to the kitchen.", False),
    ],
)
def test_a_refusal_is_an_action_not_carried_out(text: str, refused: bool) -> None:
    assert is_refused(f" {text}\n") is refused
