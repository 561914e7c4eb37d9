"""The baseline `copy` on hand-made windows."""

from __future__ import annotations

from eval.models.base import Copy
from tests.fixtures.windows import MakeWindow


def test_copy_repeats_the_last_observation(make_window: MakeWindow) -> None:
    for context_kind in ("observed", "snapshot"):
        texts = Copy().predict([make_window()], context_kind, [1, 2])[0].texts
        assert texts == dict.fromkeys((1, 2), "The fridge is now open.")
    first = make_window(history=[(None, "Start.")])
    assert Copy().predict([first], "observed", [1])[0].texts == {1: "Start."}
