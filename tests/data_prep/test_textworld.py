"""Plain TextWorld, the example of a new environment in a package: collected, cut and evaluated by the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep.__main__ import main as data_prep
from data_prep.environments import ENVIRONMENTS, make_environment
from eval.__main__ import main as evaluate
from loopwm.records.episodes import read_episodes
from loopwm.records.template import CONTEXT_KINDS

pytestmark = pytest.mark.skipif("textworld" not in ENVIRONMENTS, reason="needs examples/textworld_environment")


def test_splits_do_not_overlap() -> None:
    environment = make_environment("textworld")
    tasks = environment.tasks()
    found = [set(environment.variations(task, split)) for task in tasks for split in environment.splits()]
    assert len(set.union(*found)) * len(tasks) == sum(map(len, found)) > 0
    environment.close()


@pytest.mark.slow
def test_from_games_to_an_evaluated_table(tmp_path: Path) -> None:
    episodes, windows, out = tmp_path / "episodes", tmp_path / "windows.jsonl.gz", tmp_path / "run"
    options = ["--split", "test", "--policy", "noisy-expert", "--episodes-per-task", "2", "--tasks", "quest-small"]
    assert data_prep(["collect", "textworld", *options, "--out", str(episodes)]) == 0
    played = list(read_episodes(episodes / "quest-small-00000.jsonl.xz"))
    assert [episode.steps[-1].done and episode.steps[-1].score for episode in played] == [100, 100]
    cut = ["windows", "--episodes", str(episodes), "--count", "3", "--horizon", "2", "--hidden-state"]
    assert data_prep([*cut, "--out", str(windows)]) == 0
    for context_kind in CONTEXT_KINDS:
        run = ["run", "--model", "copy", "--suite", str(windows), "--context", context_kind, "--horizons", "1,2"]
        assert evaluate([*run, "--out", str(out / context_kind)]) == 0
        rows = json.loads((out / context_kind / "results.json").read_text())["rows"]
        assert [(row["family"], row["n"]) for row in rows] == [("overall", 3)] * 2 + [("quest", 3)] * 2
