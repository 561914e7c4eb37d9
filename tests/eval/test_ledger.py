"""The page of kept results is made of what is kept, and says how a checkpoint stands beside the floors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.reports.ledger import read_kept, render

KEPT = Path(__file__).parents[2] / "docs" / "results"


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
    for name, content in render(read_kept(KEPT / "data")):
        if name.endswith(".md"):
            assert (KEPT / name).read_text(encoding="utf-8") == content
        assert (KEPT / name).exists()


@pytest.mark.parametrize(
    ("em", "low", "high", "told"),
    [(0.7, 0.65, 0.75, "above"), (0.3, 0.2, 0.4, "below"), (0.6, 0.4, 0.7, "not told apart from")],
)
def test_a_checkpoint_stands_beside_the_best_floor(finished, tmp_path, em, low, high, told) -> None:
    runs = [finished("copy", 0.1, 0.05, 0.2), finished("retrieve-names", 0.5, 0.4, 0.6)]
    runs.append(finished("some/tiny", em, low, high, model_sha256="0" * 64))
    page = tmp_path / "page"
    assert main(["ledger", str(page), "--keep", *map(str, runs)]) == 0
    text = (page / "README.md").read_text()
    assert f"**tiny, observed: {100 * em:.1f}, {told} retrieve-names, observed (50.0).**" in text
    names = [line.split("|")[1].strip() for line in text.splitlines() if "of 50 |" in line and "Melt" not in line]
    assert names == ["tiny, observed", "retrieve-names, observed", "copy, observed"]
    assert "python -m eval run --model some/tiny" in text
    assert (page / "scienceworld-500.svg").read_text().startswith("<svg")


def test_a_run_of_the_same_model_takes_the_place_of_the_earlier_one(finished, tmp_path) -> None:
    page = tmp_path / "page"
    for em, model in ((0.5, "a/tiny"), (0.6, "b/tiny")):
        assert main(["ledger", str(page), "--keep", str(finished(model, em, 0.4, 0.7))]) == 0
    (kept,) = read_kept(page / "data")
    assert kept["rows"][0]["em"] == 0.6
    assert "stderr" not in kept["rows"][0]
    assert sorted(kept["rows"][-1]) == ["ci95", "em", "family", "horizon", "n"]


def test_what_cannot_be_kept_is_one_line(finished, tmp_path, capsys) -> None:
    folder = finished("copy", 0.1, 0.05, 0.2)
    results = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps({**results, "suite": "mine"}))
    assert main(["ledger", str(tmp_path / "page"), "--keep", str(folder)]) == 2
    assert "suite: 'mine' is not one of scienceworld-500" in capsys.readouterr().err
    assert main(["ledger", str(tmp_path / "page"), "--keep", str(tmp_path)]) == 2
    assert "not a finished run" in capsys.readouterr().err
    assert main(["ledger", str(tmp_path / "page")]) == 2
    assert "nothing is kept there" in capsys.readouterr().err
