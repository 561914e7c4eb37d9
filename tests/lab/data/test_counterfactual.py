"""What would have followed another action."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.environments.scienceworld.environment import ScienceWorld
from data_prep.windows import Cut, cut_window, write_windows
from lab.__main__ import main
from lab.data import counterfactual
from lab.data.cut_suite import read_windows
from loopwm.records.episodes import Episode, Step
from tests.fixtures.episodes import play_once
from tests.fixtures.toy import Toy


@pytest.fixture
def episode(simulator: ScienceWorld) -> Episode:
    return play_once(simulator, "gold", "find-non-living-thing", 3, "train", 160)


def test_a_counterfact_differs_in_one_earlier_action_and_in_the_answer(
    simulator: ScienceWorld, episode: Episode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScienceWorld, "close", lambda self: None)
    monkeypatch.setattr(counterfactual, "make_environment", lambda name: simulator)
    source, out = tmp_path / "w.jsonl", tmp_path / "pairs.jsonl"
    cuts = [Cut(episode, now, f"w/{now}") for now in range(3)]
    write_windows(source, [cut_window(cut, 3, None) for cut in cuts])
    assert main(["counterfactual", "--windows", str(source), "--count", "2", "--out", str(out)]) == 0
    found = read_windows(out)
    assert len(found) == 4
    for fact, other in zip(found[::2], found[1::2], strict=True):
        assert (fact["id"][-5:], other["id"]) == ("/fact", fact["id"][:-4] + "counterfact")
        assert {k for k in fact if fact[k] != other[k]} <= {"id", "actions", "observations", "rewards", "dones"}
        assert [a == b for a, b in zip(fact["actions"], other["actions"], strict=True)].count(False) == 1
        assert fact["actions"][-1] == other["actions"][-1]
        assert fact["observations"][-1] != other["observations"][-1]
        assert played(simulator, other) == (other["observations"], other["dones"])


def played(simulator: ScienceWorld, window: dict[str, Any]) -> tuple[list[str], list[bool]]:
    """What the simulator answers to the window's actions."""
    simulator.reset(window["task"], window["variation"])
    for step in window["history"][1:]:
        simulator.step(step["action"])
    steps = [simulator.step(action) for action in window["actions"]]
    return [step.observation for step in steps], [step.done for step in steps]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "line 1: expected a JSON object"),
        ('{"id": "a"}', "line 1: env: missing"),
        (json.dumps({"id": "a", "env": "chess", "task": "t", "variation": 0, "history": [], "actions": ["a", "b"],
                     "observations": []}), "got 'chess'"),
    ],
)  # fmt: skip
def test_files_without_windows_are_refused_in_one_line(
    tmp_path: Path, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "w.jsonl").write_text(line)
    options = ["--count", "1", "--out", str(tmp_path / "pairs.jsonl")]
    assert main(["counterfactual", "--windows", str(tmp_path / "w.jsonl"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


class Named(Toy):
    """A world whose answers name all actions, so that any change shows in the last answer."""

    def reset(self, task: str, variation: int | str) -> Step:
        self.played: list[str] = []
        return super().reset(task, variation)

    def step(self, action: str) -> Step:
        self.played.append(action)
        return Step(action, " ".join(self.played), 0, False)


def test_a_counterfact_keeps_the_last_action() -> None:
    window = {
        "task": "walk", "variation": 1, "history": [{"action": None, "observation": "walk 1"}],
        "actions": ["north"] * 3, "observations": ["north", "north north", "north north north"],
    }  # fmt: skip
    windows = [{**window, "id": str(i)} for i in range(40)]
    changed = [other["actions"] for _, other in counterfactual.pairs(Named(), windows, 0, "w")]
    assert len(changed) == 40
    assert {actions[-1] for actions in changed} == {"north"}
    differ = {tuple(action != "north" for action in actions) for actions in changed}
    assert differ == {(True, False, False), (False, True, False)}
