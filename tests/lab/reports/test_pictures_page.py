"""The pictures page is made of stored results of studies, rollouts, agents, searches and loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lab.__main__ import main
from lab.reports.picture_store import read_pictures
from lab.reports.pictures import PICTURES
from lab.reports.pictures_page import render
from serve.playground import FOLDER

PAGE_FOLDER = Path(__file__).parents[3] / "docs" / "results"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Folder of a page with the runs on suites only."""
    kinds = ("studies", "rollouts", "agents", "searches", "policies", "acceptances", "loads")
    shutil.copytree(PAGE_FOLDER / "data", tmp_path / "page" / "data", ignore=shutil.ignore_patterns(*kinds))
    return tmp_path / "page"


def test_committed_page_is_drawn_from_the_committed_results() -> None:
    made = dict(render(read_pictures(PAGE_FOLDER / "data")))
    assert {name: (PAGE_FOLDER / name).read_text(encoding="utf-8") == content for name, content in made.items()} == (
        dict.fromkeys(["pictures.md", *(f"{picture.name}.svg" for picture in PICTURES)], True)
    )
    assert sorted(path.name for path in PAGE_FOLDER.glob("*.svg")) == sorted(
        name for name in made if name.endswith(".svg")
    )


def test_pictures_without_results_show_the_commands(page: Path) -> None:
    made = dict(render(read_pictures(page / "data")))
    missing = [picture for picture in PICTURES if f"{picture.name}.svg" not in made]
    assert [picture.name for picture in missing] == [
        "rollouts",
        "studies",
        "cost",
        "service",
        "agents",
        "search",
        "policies",
        "acceptance",
    ]
    for picture in missing:
        assert f"this command makes one:\n\n    {picture.command}\n" in made["pictures.md"]


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
    "agents": {"n": 3, "arms": {arm: {"score": SCORE, "lost": SCORE, "refused": 2, "steps": 9}
                                for arm in ("retrieval", "ahead")},
               "differences": [{"a": "ahead", "b": "retrieval", "score": {"mean": -5.0, "ci95": [-9, 1]}, "lost": SCORE,
                                "refused": SCORE, "steps": SCORE}], "task_scores": {}},
    "searches": {"n": 3, "arms": {arm: {"steps": SCORE, "won": SCORE} for arm in ("listed", "model")},
                 "differences": {"listed": {"steps": {"mean": -9.0, "ci95": [-14, -6]}, "won": SCORE}},
                 "game_steps": {"listed": [9, 20, 31], "model": [7, 9, 11]}},
    "policies": {"n": 3, "demonstrations": 50,
                 "arms": {arm: {"steps": SCORE, "won": SCORE} for arm in ("cloned", "imagined")},
                 "difference": {"won": {"mean": 7.0, "ci95": [1, 13]}, "steps": SCORE},
                 "by_game": {"won": {"cloned": [0, 100, 0], "imagined": [100, 100, 0]},
                             "steps": {"cloned": [9, 9, 9], "imagined": [8, 8, 9]}},
                 "tasks": {"put": {"n": 3, "cloned": 1, "imagined": 2}}},
    "acceptances": {"states": 2, "games": 2, "head": {"bins": [[3, 0.5, 0.0], [15, 0.1, 0.0], [12, 0.9, 1.0]]},
                    "head_and_text": {"accepted": {"f1": 0.9, "f1_ci95": [0.8, 0.95]}}},
    "loads": {"model": "tiny",
              "load": [{"workload": "chat", "at_once": n, "tokens_per_second": 9.0 * n} for n in (1, 8)],
              "roof": [{"at_once": 8, "tokens_per_second": 100.0}]},
}  # fmt: skip


def test_finished_results_of_every_kind_are_kept_and_drawn(page, tmp_path) -> None:
    folders = []
    for kind, results in OTHERS.items():
        folders.append(tmp_path / kind)
        folders[-1].mkdir()
        provenance = {
            "command": f"the {kind} command",
            "split": "dev",
            "model_sha256": "1" * 64,
            "seed": 2,
            "rounds": 4,
            "states": "acceptance_tiny.jsonl.xz",
        }
        (folders[-1] / "results.json").write_text(json.dumps({**results, "provenance": provenance}))
    assert main(["pictures", str(page), "--keep", *map(str, folders)]) == 0
    text, store = (page / "pictures.md").read_text(), read_pictures(page / "data")
    assert [len(result["differences"]) for result in store.studies] == [1]
    assert "0 of 1 differences" not in text
    assert "1 of 1 differences leave out zero" in text
    assert "depth, checkpoint 11111111: T=1 51.0 at 2.0 MFLOPs, best T=2 52.0 at 3.0 MFLOPs" in text
    assert "textworld -2.0 (-3.0 to -1.0)" in text
    assert "ahead minus retrieval, checkpoint 11111111: -5.0 (-9.0 to +1.0)" in text
    assert "checkpoint 11111111, -9.0 (-14.0 to -6.0) from listed" in text
    assert "checkpoint 11111111, 50 demonstrations: +33.3 (+0.0 to +100.0)." in text
    assert "checkpoint 11111111: tiny 0.90 (0.80 to 0.95) in 2 states." in text
    assert "Chat: 72 tokens a second with 8 at once, 9 with 1 (checkpoint 11111111)" in text
    assert all(f"- `the {kind} command`" in text for kind in OTHERS)


def test_studies_of_one_kind_stand_together_where_their_arms_were_trained_from_other_configurations(
    page, tmp_path
) -> None:
    folders = []
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
    assert main(["pictures", str(page), "--keep", *map(str, folders)]) == 0
    assert [result["base"] for result in read_pictures(page / "data").studies] == ["large", "small"]


def test_a_study_of_pixels_stands_in_the_same_picture(page, tmp_path) -> None:
    sides = {"ours": "transport", "theirs": "sample", "part": "frame", "creatures": "all"}
    results = {
        "study": "twisted accuracy", "transitions": 60, "provenance": {"command": "the pixels command"},
        "differences": [{**sides, **DIFFERENCE}, {**sides, **DIFFERENCE, "creatures": "with"}],
    }  # fmt: skip
    (tmp_path / "pixels").mkdir()
    (tmp_path / "pixels" / "results.json").write_text(json.dumps(results))
    folders = [tmp_path / "pixels"]
    assert main(["pictures", str(page), "--keep", *map(str, folders)]) == 0
    result = json.loads((page / "data" / "studies" / "twisted-accuracy.json").read_text())
    assert (result["windows"], [d["arm"] for d in result["differences"]]) == (60, ["transport"])
    assert "1 of 1 differences leave out zero" in (page / "pictures.md").read_text()


def test_keep_of_an_unknown_study_is_an_error(page, tmp_path, capsys) -> None:
    results = {"study": "looping in pixels", "differences": [{"arm": "once"}], "provenance": {}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert main(["pictures", str(page), "--keep", str(tmp_path)]) == 2
    known = "study: must be one of ablate, deferral, depth, halting, looping, twisted accuracy, got looping in pixels"
    assert f"results.json: {known}\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["trust", "acceptance"])
def test_playground_shows_the_picture_of_the_page(name: str) -> None:
    picture = (PAGE_FOLDER / f"{name}.svg").read_bytes()
    assert (FOLDER / f"{name}.svg").read_bytes() == picture, f"copy docs/results/{name}.svg to serve/playground"
