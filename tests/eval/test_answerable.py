"""The answerable rule against 50 items of dev windows that were labelled by reading them, with a reason each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval.scores.metrics import is_answerable, known_names

ITEMS = Path(__file__).parent / "data" / "answerable.jsonl"
MISSED = {"dev-windows/lifespan/0002"}
"""`parrot egg` is what the action called `egg parrot`: the rule does not see that they are one name."""


def rule(item: dict[str, Any]) -> bool:
    return is_answerable(item["env"], item["reference"], known_names(item["env"], item["texts"]), item["actions"])


def test_the_rule_decides_as_a_reader_does_but_for_one_known_miss() -> None:
    items = [json.loads(line) for line in ITEMS.read_text().splitlines()]
    assert len({item["id"] for item in items}) == 50
    assert all(item["reason"] for item in items)
    assert {item["id"] for item in items if rule(item) != item["answerable"]} == MISSED


def test_what_is_answerable_follows_from_what_is_known() -> None:
    """Without its context and actions no item that names something is answerable."""
    items = [json.loads(line) for line in ITEMS.read_text().splitlines()]
    naming = [item for item in items if not item["reason"].startswith(("names nothing", "a door"))]
    assert not any(rule({**item, "texts": [], "actions": []}) for item in naming)
