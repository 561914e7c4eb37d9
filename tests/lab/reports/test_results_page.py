"""The results page is made of stored results, and compares a checkpoint with the baselines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.models.checkpoint import checkpoint_hash
from lab.main import main
from lab.reports.results_page import SHIPPED_NAME, SUITE_TITLES, called, in_short, read_store, render

ROOT = Path(__file__).parents[3]
PAGE_FOLDER = ROOT / "docs" / "results"
README, CARD = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "loopwm/pretrained/README.md"))


def row(family: str, horizon: int, em: float, low: float, high: float) -> dict[str, Any]:
    return {
        "family": family, "horizon": horizon, "n": 50, "games": 20, "em": em, "f1": 0.9, "bleu4": 0.8,
        "entity_recall": 0.7, "ci95": {"em": [low, high]}, "stderr": {"em": 0.1}, "em_novel": em / 2, "n_novel": 10,
        "errors": dict.fromkeys(("refusal", "reading", "state", "repetition", "name", "list", "other"), 1),
        "refusal": {"n": 2, "predicted": 1, "precision": 1.0, "recall": 0.5},
    }  # fmt: skip


@pytest.fixture
def finished(tmp_path: Path) -> Callable[..., Path]:
    def make(model: str, em: float, low: float, high: float, **facts: Any) -> Path:
        folder = tmp_path / model.replace("/", "-")
        folder.mkdir()
        rows = [row(family, k, em, low, high) for family in ("overall", "Melt") for k in (1, 5)]
        results = {
            "model": model, "suite": "scienceworld-500", "context": "observed", "metrics_version": "metrics-v1",
            "intervals": "games-v1", "windows": {"asked": 50, "scored": 50, "refused": 0}, "unanswered": 0,
            "refused": {}, "seen_in": None, "pairs": None, "rows": rows,
            "provenance": {"command": f"python -m eval run --model {model}", "limit": None, **facts},
        }  # fmt: skip
        (folder / "results.json").write_text(json.dumps(results))
        return folder

    return make


def test_the_committed_page_is_what_the_committed_results_say() -> None:
    assert (PAGE_FOLDER / "README.md").read_text(encoding="utf-8") == render(read_store(PAGE_FOLDER / "data"))


@pytest.mark.parametrize(
    ("em", "low", "high", "told"),
    [(0.7, 0.65, 0.75, "above"), (0.3, 0.2, 0.4, "below"), (0.6, 0.4, 0.7, "not told apart from")],
)
def test_a_checkpoint_stands_beside_the_best_baseline(finished, tmp_path, em, low, high, told) -> None:
    runs = [finished("copy", 0.1, 0.05, 0.2), finished("retrieve-names", 0.5, 0.4, 0.6)]
    runs.append(finished("some/tiny", em, low, high, model_sha256="0" * 64))
    page = tmp_path / "page"
    assert main(["results", str(page), "--keep", *map(str, runs)]) == 0
    text = (page / "README.md").read_text()
    assert f"**tiny, observed: {100 * em:.1f}, {told} retrieve-names, observed (50.0).**" in text
    names = [line.split("|")[1].strip() for line in text.splitlines() if "of 50 |" in line and "Melt" not in line]
    assert names == ["tiny, observed", "retrieve-names, observed", "copy, observed"]


def test_a_limited_run_is_labelled_with_its_windows(finished, tmp_path) -> None:
    runs = [finished("copy", 0.1, 0.05, 0.2), finished("retrieve", 0.3, 0.2, 0.4, limit=50)]
    page = tmp_path / "page"
    assert main(["results", str(page), "--keep", *map(str, runs)]) == 0
    text = (page / "README.md").read_text()
    assert "| copy, observed |" in text
    assert "| retrieve, observed, 50 windows |" in text


def test_a_run_of_the_same_model_takes_the_place_of_the_earlier_one(finished, tmp_path) -> None:
    page = tmp_path / "page"
    for em, model in ((0.5, "a/tiny"), (0.6, "b/tiny")):
        assert main(["results", str(page), "--keep", str(finished(model, em, 0.4, 0.7))]) == 0
    (result,) = read_store(page / "data")
    assert result["rows"][0]["em"] == 0.6
    assert "stderr" not in result["rows"][0]
    assert sorted(result["rows"][-1]) == ["ci95", "em", "family", "horizon", "n"]


def test_runs_of_other_windows_or_another_table_of_seen_ones_do_not_stand_together(finished, tmp_path, capsys):
    arguments, folders = ["results", str(tmp_path / "page"), "--keep"], []
    for name, (suite, seen) in {"copy": ("a", "1"), "markov": ("b", "1"), "retrieve": ("a", "2")}.items():
        folders.append(finished(name, 0.1, 0.05, 0.2, suite_sha256=suite))
        results = json.loads((folders[-1] / "results.json").read_text())
        results["seen_in"] = {"episodes_sha256": seen, "episodes": 1, "transitions": 1}
        (folders[-1] / "results.json").write_text(json.dumps(results))
    assert main([*arguments, str(folders[0])]) == 0
    assert main([*arguments, str(folders[1])]) == 2
    assert "scienceworld-500: runs must have the same windows" in capsys.readouterr().err
    (tmp_path / "page/data/scienceworld-500--observed--markov.json").unlink()
    assert main([*arguments, str(folders[2])]) == 2
    assert "scienceworld-500: runs must have the same tables of what was seen" in capsys.readouterr().err


def test_what_cannot_be_kept_is_one_line(finished, tmp_path, capsys) -> None:
    folder = finished("copy", 0.1, 0.05, 0.2)
    results = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps({**results, "suite": "mine"}))
    assert main(["results", str(tmp_path / "page"), "--keep", str(folder)]) == 2
    assert "suite: must be one of scienceworld-probe" in capsys.readouterr().err
    assert main(["results", str(tmp_path / "page"), "--keep", str(tmp_path)]) == 2
    assert "must be a finished run" in capsys.readouterr().err
    (tmp_path / "results.json").write_text("{}")
    assert main(["results", str(tmp_path / "page"), "--keep", str(tmp_path)]) == 2
    assert "rows: missing" in capsys.readouterr().err
    assert main(["results", str(tmp_path / "page")]) == 2
    assert "must hold results of runs" in capsys.readouterr().err


@pytest.mark.parametrize("page", [README, CARD], ids=["README", "card"])
def test_the_figures_of_the_shipped_checkpoint_are_those_of_its_runs(page):
    table = in_short(read_store(ROOT / "docs/results/data"))
    assert len(table.splitlines()) == 2 + len(SUITE_TITLES)
    assert table in page


def test_the_figures_are_of_the_weights_that_ship():
    result = [run for run in read_store(ROOT / "docs/results/data") if called(run["model"]) == SHIPPED_NAME]
    assert {run["provenance"]["model_sha256"] for run in result} == {checkpoint_hash(ROOT / "loopwm/pretrained")}


@pytest.mark.parametrize(("low", "high"), [(0.6, 0.7), (0.3, 0.4), (0.6, 0.4)])
def test_a_mean_outside_of_its_bounds_is_refused(finished, tmp_path, low, high, capsys) -> None:
    page = tmp_path / "page"
    assert main(["results", str(page), "--keep", str(finished("copy", 0.5, low, high))]) == 2
    where = f"scienceworld-500--observed--copy.json: overall 1: em: must be in its bounds [{low}, {high}], got 0.5"
    assert where in capsys.readouterr().err
