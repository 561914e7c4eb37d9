from __future__ import annotations

from pathlib import Path

from lab.data.hidden_lines import unreadable_line
from loopwm.records.files import read_json_lines

SUITE = Path(__file__).parents[3] / "eval/suites/alfworld-500.jsonl.gz"


def test_lines_of_the_suite_are_valid_and_a_changed_word_is_not() -> None:
    states = [window["hidden_state"] for _, window in read_json_lines(SUITE)]
    assert {unreadable_line("alfworld", state) for state in states} == {None}
    lamp = next(state for state in states if state.endswith("The desklamp 1 is off."))
    assert unreadable_line("alfworld", lamp.replace("is off", "glows")) == "The desklamp 1 glows."
    assert unreadable_line("scienceworld", "glows") is None
