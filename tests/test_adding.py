"""A metric, an exit rule or a text environment is added in one file, and all that lists such things knows it then."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import get_args

import pytest

import data_prep.environments
from data_prep.__main__ import main as data_prep_main
from data_prep.environments import ENVIRONMENTS, declared, family_of, find_environments, registered_environments
from eval.__main__ import main as eval_main
from eval.models.checkpoint import read_depth
from eval.scores.metrics import METRICS, Metric, names_of
from loopwm.core.exit_rules import RULES, format_rule, make_rule, numbers_of
from serve.http import bodies

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "examples/textworld_environment"

ENVIRONMENT = """
from data_prep.environments.base import Declared
from loopwm.records.episodes import Step
from loopwm.records.names import NameList, Names

LIST = NameList(["red door"])


class Doors(Declared):
    name, looks, idles, solver = "doors", ("look",), ("wait",), "gold"
    families = {"doors": ("open",)}
    names = Names(LIST.longest, LIST.anywhere, LIST.split)

    def version(self):
        return {"doors": "1"}

    def tasks(self):
        return ["open"]

    def splits(self):
        return ["train", "test"]

    def variations(self, task, split):
        return [0, 1] if split == "train" else [2, 3]

    def gold_actions(self, task, variation):
        return ["knock"] * 3 + ["open red door"]

    def reset(self, task, variation):
        self.at, self.count = (task, variation), 0
        return Step(None, f"You see a red door, number {variation}.", 0, False)

    def step(self, action):
        self.count += 1
        done = action.startswith("open")
        return Step(action, f"The red door answers {self.count}.", 100 * done, done)

    def goal(self):
        return "open the red door"

    def loaded(self):
        return self.at

    def hidden_state(self):
        return None

    def valid_actions(self):
        return ["knock", "open red door"]

    def exhausted(self):
        return False

    def close(self):
        pass


ENVIRONMENT = Doors
"""

RULE = """
import dataclasses
from typing import ClassVar

import torch

from loopwm.core.exit_rules import exit_rule


@exit_rule("second")
@dataclasses.dataclass(frozen=True)
class Second:
    \"\"\"Leaves after the second loop, or where it is less sure.\"\"\"

    doubt: float
    limit: int
    needs_gate: ClassVar[bool] = False
    depends_on_batch: ClassVar[bool] = False

    def for_pass(self, index, rows):
        return self

    def exits(self, view):
        return torch.full((len(view.states[-1]),), view.loop >= 2)
"""


@pytest.fixture
def doors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only file of an environment that was found beside the others."""
    folder = tmp_path / "environments"
    folder.mkdir()
    (folder / "doors.py").write_text(ENVIRONMENT)
    monkeypatch.setattr(data_prep.environments, "__path__", [*data_prep.environments.__path__, str(folder)])
    for name, environment in find_environments([str(folder)]).items():
        monkeypatch.setitem(ENVIRONMENTS, name, environment)
    yield folder / "doors.py"
    sys.modules.pop("data_prep.environments.doors")


def test_entry_points_of_environments_are_found(monkeypatch):
    groups = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]["entry-points"]
    points = [EntryPoint(name, value, group) for group, lines in groups.items() for name, value in lines.items()]
    monkeypatch.syspath_prepend(PLUGIN)
    monkeypatch.setattr(
        data_prep.environments, "entry_points", lambda group: [point for point in points if point.group == group]
    )
    ((name, environment),) = registered_environments().items()
    assert (name, environment.name, environment.families["quest"][0]) == ("textworld", "textworld", "quest-small")


def test_an_environment_is_one_file(doors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    episodes, windows, out = tmp_path / "episodes", tmp_path / "windows.jsonl", tmp_path / "run"
    split = ["--split", "test", "--policy", "gold", "--episodes-per-task", "2"]
    assert data_prep_main(["collect", "doors", *split, "--out", str(episodes)]) == 0
    cut = ["--episodes", str(episodes), "--count", "2", "--horizon", "2", "--out", str(windows)]
    assert data_prep_main(["windows", *cut]) == 0
    scored = ["--suite", str(windows), "--context", "observed", "--horizons", "1,2", "--out", str(out)]
    assert eval_main(["run", "--model", "copy", *scored]) == 0
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [(row["family"], row["entity_recall"]) for row in rows] == [
        (f, 1.0) for f in ("overall", "doors")
    ] * 2 or rows
    assert family_of("doors", "open") == "doors"
    assert names_of("doors").named("a red door") == {"red door"}  # type: ignore[union-attr]
    assert [path.name for path in doors.parent.glob("*.py")] == ["doors.py"]


def test_the_environments_of_the_project_are_found_and_their_extras_install_what_they_import() -> None:
    assert set(ENVIRONMENTS) >= {"alfworld", "scienceworld"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("alfworld", "scienceworld"):
        assert any(line.startswith(declared(name).packages[0]) for lines in extras.values() for line in lines)
    assert declared("nowhere").names is None


def test_a_metric_is_one_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = Metric("Words", lambda env, prediction, reference: float(len(prediction.split()) == len(reference.split())))
    monkeypatch.setitem(METRICS, "words", words)
    a, b = tmp_path / "a", tmp_path / "b"
    for out in (a, b):
        options = [
            "--suite",
            "scienceworld-dev",
            "--limit",
            "40",
            "--context",
            "observed",
            "--horizons",
            "1",
            "--out",
            str(out),
        ]
        assert eval_main(["run", "--model", "copy", *options]) == 0
    overall, *_ = json.loads((a / "results.json").read_text())["rows"]
    assert 0 <= overall["words"] <= 1
    assert len(overall["ci95"]["words"]) == 2
    assert "| Words |" in (a / "report.md").read_text()
    capsys.readouterr()
    assert eval_main(["compare", str(a), str(b)]) == 0
    assert "\n| words | 1 | 40 |" in capsys.readouterr().out


def test_an_exit_rule_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_rule.py").write_text(RULE)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        rule = import_module("toy_rule").Second(0.5, 3)
        assert read_depth("second:doubt=0.5,limit=3") == rule
        assert read_depth(str(format_rule(rule))) == rule
        asked = bodies._body_of("second").model_validate({"rule": "second", "doubt": 0.5, "limit": 3})
        numbers = bodies.depth_of(asked)
        assert make_rule(numbers.pop("rule"), numbers) == rule
    finally:
        RULES.pop("second")
        sys.modules.pop("toy_rule")


def test_requests_may_ask_for_every_rule_of_numbers_that_does_not_depend_on_the_batch() -> None:
    offered = {get_args(body.model_fields["rule"].annotation)[0] for body in bodies.RULE_BODIES}
    assert offered == {name for name, rule in RULES.items() if numbers_of(name) and not rule.depends_on_batch}
