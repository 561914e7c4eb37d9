"""The results page is made of stored results, and compares a checkpoint with the baselines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.reports.pictures import PICTURES
from eval.reports.results_page import render
from eval.reports.results_store import read_store

PAGE_FOLDER = Path(__file__).parents[2] / "docs" / "results"


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


def test_the_committed_page_and_pictures_are_what_the_committed_results_say() -> None:
    made = dict(render(read_store(PAGE_FOLDER / "data")))
    assert {name: (PAGE_FOLDER / name).read_text(encoding="utf-8") == content for name, content in made.items()} == (
        dict.fromkeys(["README.md", *(f"{picture.name}.svg" for picture in PICTURES)], True)
    )
    assert sorted(path.name for path in PAGE_FOLDER.glob("*.svg")) == sorted(
        name for name in made if name.endswith(".svg")
    )


def test_pictures_that_nothing_is_kept_for_are_left_out_with_the_commands_that_make_them(tmp_path) -> None:
    kinds = ("studies", "rollouts", "agents", "loads")
    shutil.copytree(PAGE_FOLDER / "data", tmp_path / "data", ignore=shutil.ignore_patterns(*kinds))
    made = dict(render(read_store(tmp_path / "data")))
    missing = [picture for picture in PICTURES if f"{picture.name}.svg" not in made]
    assert [picture.name for picture in missing] == ["rollouts", "studies", "cost", "service", "agents"]
    for picture in missing:
        assert f"this command makes one:\n\n    {picture.command}\n" in made["README.md"]


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
    assert "python -m eval run --model MODEL" in text
    assert (page / "horizons.svg").read_text().startswith("<svg")


def test_a_run_of_the_same_model_takes_the_place_of_the_earlier_one(finished, tmp_path) -> None:
    page = tmp_path / "page"
    for em, model in ((0.5, "a/tiny"), (0.6, "b/tiny")):
        assert main(["results", str(page), "--keep", str(finished(model, em, 0.4, 0.7))]) == 0
    (result,) = read_store(page / "data").runs
    assert result["rows"][0]["em"] == 0.6
    assert "stderr" not in result["rows"][0]
    assert sorted(result["rows"][-1]) == ["ci95", "em", "family", "horizon", "n"]


DIFFERENCE = {"metric": "em", "difference": -0.02, "low": -0.03, "high": -0.01, "by_seed": [-0.02]}
ROLLOUT_ROW = {"depth": 1, "n": 3, "em": 0.5, "f1": 0.6, "ci95": {"em": [0.25, 0.75]}}
SCORE = {"mean": 50.0, "ci95": [40.0, 60.0]}
OTHERS: dict[str, dict[str, Any]] = {
    "studies": {
        "study": "depth", "settings": {"model": "a/tiny"}, "windows": 40, "flops_per_token": {"1": 2e6, "2": 3e6},
        "means": [{"arm": f"T={t}", "metric": "em", "horizon": "all", "mean": 0.5 + t / 100} for t in (1, 2)],
        "differences": [{"arm": "T=1", "reference": "T=2", "horizon": "all", **DIFFERENCE},
                        {"arm": "T=1", "reference": "T=2", "horizon": 1, **DIFFERENCE}],
    },
    "rollouts": {
        "model": "a/tiny", "env": "textworld", "context": "observed", "n": 3, "latent_minus_fed_back": [DIFFERENCE],
        "rows": [{"way": way, **ROLLOUT_ROW} for way in ("latent", "fed_back")],
    },
    "agents": {"n": 3, "arms": {"retrieval": {"score": SCORE}, "look-ahead-4": {"score": SCORE}}, "task_scores": {},
               "differences": [{"a": "look-ahead-4", "b": "retrieval", "score": {"mean": -5.0, "ci95": [-9, 1]}}]},
    "loads": {"model": "tiny",
              "load": [{"workload": "chat", "at_once": n, "tokens_per_second": 9.0 * n} for n in (1, 8)],
              "roof": [{"at_once": 8, "tokens_per_second": 100.0}]},
}  # fmt: skip


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


def test_what_studies_rollouts_agents_and_loads_came_to_is_kept_and_drawn(finished, tmp_path) -> None:
    page, folders = tmp_path / "page", [finished("copy", 0.1, 0.05, 0.2)]
    for kind, results in OTHERS.items():
        folders.append(tmp_path / kind)
        folders[-1].mkdir()
        provenance = {"command": f"the {kind} command", "split": "dev", "model_sha256": "1" * 64}
        (folders[-1] / "results.json").write_text(json.dumps({**results, "provenance": provenance}))
    assert main(["results", str(page), "--keep", *map(str, folders)]) == 0
    text, store = (page / "README.md").read_text(), read_store(page / "data")
    assert [len(result["differences"]) for result in store.studies] == [1]
    assert "0 of 1 differences" not in text
    assert "1 of 1 differences leave out zero" in text
    assert "depth, checkpoint 11111111: T=1 51.0 at 2.0 MFLOPs, best T=2 52.0 at 3.0 MFLOPs" in text
    assert "textworld -2.0 (-3.0 to -1.0)" in text
    assert "look-ahead-4 minus retrieval, checkpoint 11111111: -5.0 (-9.0 to +1.0)" in text
    assert "Chat: 72 tokens a second with 8 at once, 9 with 1 (checkpoint 11111111)" in text
    assert all(f"- `the {kind} command`" in text for kind in OTHERS)


def test_studies_of_one_kind_stand_together_where_their_arms_were_trained_from_other_configurations(
    finished, tmp_path
) -> None:
    folders = [finished("copy", 0.1, 0.05, 0.2)]
    for base in ("small", "large"):
        arms = [{"arm": arm, "flops_per_token": 1e6} for arm in ("looped", "once")]
        results = {
            "study": "looping", "protocol": {"base": f"configs/{base}.yaml"}, "windows": 4, "arms": arms, "means": [],
            "differences": [{"arm": "once", "reference": "looped", "horizon": "all", **DIFFERENCE}],
            "provenance": {"command": f"the {base} command"},
        }  # fmt: skip
        folders.append(tmp_path / base)
        folders[-1].mkdir()
        (folders[-1] / "results.json").write_text(json.dumps(results))
    assert main(["results", str(tmp_path / "page"), "--keep", *map(str, folders)]) == 0
    assert [result["base"] for result in read_store(tmp_path / "page" / "data").studies] == ["large", "small"]


def test_a_study_of_pixels_stands_in_the_same_picture(finished, tmp_path) -> None:
    sides = {"ours": "transport", "theirs": "sample", "part": "frame", "creatures": "all"}
    results = {
        "study": "twisted accuracy", "transitions": 60, "provenance": {"command": "the pixels command"},
        "differences": [{**sides, **DIFFERENCE}, {**sides, **DIFFERENCE, "creatures": "with"}],
    }  # fmt: skip
    (tmp_path / "pixels").mkdir()
    (tmp_path / "pixels" / "results.json").write_text(json.dumps(results))
    folders = [finished("copy", 0.1, 0.05, 0.2), tmp_path / "pixels"]
    assert main(["results", str(tmp_path / "page"), "--keep", *map(str, folders)]) == 0
    result = json.loads((tmp_path / "page" / "data" / "studies" / "twisted-accuracy.json").read_text())
    assert (result["windows"], [d["arm"] for d in result["differences"]]) == (60, ["transport"])
    assert "1 of 1 differences leave out zero" in (tmp_path / "page" / "README.md").read_text()


def test_what_cannot_be_kept_is_one_line(finished, tmp_path, capsys) -> None:
    folder = finished("copy", 0.1, 0.05, 0.2)
    results = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps({**results, "suite": "mine"}))
    assert main(["results", str(tmp_path / "page"), "--keep", str(folder)]) == 2
    assert "suite: must be one of scienceworld-500" in capsys.readouterr().err
    assert main(["results", str(tmp_path / "page"), "--keep", str(tmp_path)]) == 2
    assert "must be a finished run" in capsys.readouterr().err
    (tmp_path / "results.json").write_text("{}")
    assert main(["results", str(tmp_path / "page"), "--keep", str(tmp_path)]) == 2
    assert "must have one of the keys suite" in capsys.readouterr().err
    assert main(["results", str(tmp_path / "page")]) == 2
    assert "must hold results of runs" in capsys.readouterr().err
