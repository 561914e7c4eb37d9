"""The examples of the few-shot prompt are chosen by their verbs."""

from __future__ import annotations

from pathlib import Path

from eval.scores.suites import load_suite
from lab.main import main
from tests.fixtures.windows import MakeWindow, WriteSuite


def test_examples_are_chosen_for_the_verbs_they_show(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path
) -> None:
    def train(name: str, *verbs: str, goal: str = "g") -> object:
        return make_window(name, split="train", goal=goal, actions=[f"{verb} it" for verb in verbs])

    windows = [
        train("few", "go", "go", "go", "go", "go"),
        train("many", "go", "open", "look", "take", "put"),
        train("new", "go", "heat", "heat", "heat", "heat"),
        train("long", "a", "b", "c", "d", "e", goal="x" * 4000),
    ]
    out = tmp_path / "examples.jsonl.gz"
    options = ["build-examples", "--windows", str(write_suite(windows)), "--out", str(out)]
    assert main([*options, "--count", "2"]) == 0
    assert [window["id"] for window in load_suite(str(out)).windows] == ["many", "new"]
    assert main([*options, "--count", "4"]) == 2
