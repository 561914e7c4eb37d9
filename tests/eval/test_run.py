"""The commands: results, resuming, refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.baselines import Copy
from eval.compare import compare_runs
from eval.predictors import Prediction
from eval.run_folder import read_records
from tests.eval.conftest import MakeWindow, WriteSuite, episode

RUN = ["run", "--model", "copy", "--context", "observed", "--batch-size", "4"]

KILLED_IN_FOURTH_BATCH = """
import os, signal, sys
from eval.__main__ import main
from eval.baselines import Copy

predict, calls = Copy.predict, []

def stop(self, *args):
    calls.append(1)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return predict(self, *args)

Copy.predict = stop
main(sys.argv[1:])
"""


def run(suite: Path | str, out: Path, *options: str) -> int:
    return main([*RUN, "--suite", str(suite), "--out", str(out), *options])


def results(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "results.json").read_text())
    return loaded


def test_a_run_writes_results_predictions_and_report(suite_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(suite_path, out, "--horizons", "5,1") == 0
    found = results(out)
    assert (found["model"], found["suite"], found["context"]) == ("copy", "suite", "observed")
    assert found["metrics_version"] == "metrics-v1"
    assert {"suite_sha256", "command", "versions", "seed"} <= found["provenance"].keys()
    assert [(r["family"], r["horizon"]) for r in found["rows"]] == [
        (family, horizon) for family in ("overall", "Boil", "Find", "Melt") for horizon in (1, 5)
    ]
    records = read_records(out / "predictions.jsonl")
    assert len(records) == 40 * 2
    assert records["w1", 5]["target"] == "You move to the kitchen."
    report = (out / "report.md").read_text()
    assert "| Melt | 13 | 0.0 / " in report
    assert "73.0 / 91.9 / 85.7 / 91.6" in report  # the paper's row for Melt


def test_the_papers_rows_do_not_stand_beside_a_selection(
    suite_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for suite, stand in ((suite_path, True), (f"{suite_path}:word2world", False)):
        assert run(suite, tmp_path / str(stand)) == 0
        shown = (capsys.readouterr().out, (tmp_path / str(stand) / "report.md").read_text())
        assert ["paper: LoopWM" in text for text in shown] == [stand] * 2


def test_a_killed_run_goes_on_to_identical_files(suite_path: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(suite_path, whole) == 0
    command = [sys.executable, "-c", KILLED_IN_FOURTH_BATCH, *RUN, "--suite", str(suite_path), "--out", str(killed)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -signal.SIGKILL
    torn = (killed / "predictions.jsonl").read_bytes()
    assert torn.count(b"\n") == 3 * 4 * 5
    (killed / "predictions.jsonl").write_bytes(torn[:-30])  # as if the last line had not reached the disk whole
    assert run(suite_path, killed) == 0
    assert (killed / "predictions.jsonl").read_bytes() == (whole / "predictions.jsonl").read_bytes()
    assert results(killed)["rows"] == results(whole)["rows"]


def test_a_finished_run_predicts_nothing_again(
    suite_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(suite_path, tmp_path / "out") == 0

    def refuse(*_: object) -> list[Prediction]:
        raise AssertionError("predicted again")

    monkeypatch.setattr(Copy, "predict", refuse)
    assert run(suite_path, tmp_path / "out") == 0


def test_limit_draws_the_same_windows_in_every_run(suite_path: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run(suite_path, tmp_path / name, "--limit", "9") == 0
    a, b = (read_records(tmp_path / name / "predictions.jsonl") for name in ("a", "b"))
    assert a == b
    assert len(a) == 9 * 5


@pytest.mark.parametrize("model", ["copy", "retrieve", "openai:http://127.0.0.1:9#none"])
def test_what_needs_no_torch_does_not_load_it(suite_path: Path, tmp_path: Path, model: str) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text(episode(*[(f"go {n}", "You go.") for n in range(6)]))
    code = "import sys, eval.endpoint\nfrom eval.__main__ import main\neval.endpoint.ATTEMPTS = 1\nmain(sys.argv[1:])\n"
    code += "sys.exit('torch' in sys.modules)"
    options = ["--model", model, "--suite", str(suite_path), "--out", str(tmp_path / "out")]
    if model == "retrieve":
        options += ["--train-episodes", str(train)]
    if model.startswith("openai:"):
        options += ["--reply-cache", str(tmp_path / "replies.sqlite"), "--request-timeout", "0.01", "--limit", "1"]
    command = [sys.executable, "-c", code, *RUN, *options]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_compare_pairs_the_windows(make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path) -> None:
    said = "You move to the hallway."
    history = [(None, "Start."), ("go to hallway", said)]
    suite = write_suite([make_window(f"w{i}", history if i % 4 == 0 else None) for i in range(100)])
    a, b = tmp_path / "a", tmp_path / "b"
    assert run(suite, a, "--horizons", "1,2") == 0
    assert run(suite, b, "--horizons", "1") == 0
    edited = (b / "predictions.jsonl").read_text().replace(f'"prediction": "{said}"', '"prediction": "x"')
    (b / "predictions.jsonl").write_text(edited)
    em = compare_runs(a, b)[0]
    assert (em.metric, em.horizon, em.n, em.a, em.b, em.difference) == ("em", 1, 100, 0.25, 0.0, 0.25)
    assert em.low == pytest.approx(0.25 - 1.96 * 0.0433, abs=0.02)
    same = compare_runs(a, a)[0]
    assert (same.difference, same.low, same.high) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--suite", "scienceworld-501"], "--suite: 'scienceworld-501'"),
        (["--model", "oracle"], "--model: 'oracle'"),
        (["--model", "{empty}"], "--model: {empty}"),
        (["--context", "full"], "window w0: hidden_state"),
        (["--context", "all"], "--context"),
        (["--horizons", "0"], "--horizons"),
        (["--horizons", "1,x"], "--horizons"),
        (["--horizons", "6"], "window w0: actions"),
        (["--limit", "0"], "--limit"),
        (["--depth", "4"], "--depth"),
        (["--shots", "2"], "--shots"),
        (["--concurrency", "2"], "--concurrency"),
        (["--no-temperature"], "--no-temperature: not an option of 'copy'"),
        (["--reasoning-effort", "low"], "--reasoning-effort: not an option of 'copy'"),
        (["--max-tokens", "9", "--max-completion-tokens", "9"], "--max-completion-tokens: not allowed with"),
        (["--price-in", "free"], "--price-in"),
        (["--model", "openai:nowhere"], "--model"),
        (["--model", "retrieve"], "--train-episodes"),
        (["--train-episodes", "x.jsonl"], "--train-episodes"),
        (["--model", "markov", "--train-episodes", "x.jsonl"], "x.jsonl"),
        (["--out", "{full}"], "--out: {full}"),
    ],
)
def test_bad_arguments_are_one_line_status_two_and_leave_nothing(
    suite_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    places = {"empty": str(tmp_path / "empty"), "full": str(tmp_path / "full")}
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    arguments = [*RUN, "--suite", str(suite_path), "--out", str(tmp_path / "out")]
    try:
        status: Any = main([*arguments, *(option.format(**places) for option in options)])
    except SystemExit as stop:  # argparse
        status = stop.code
    stderr = capsys.readouterr().err
    assert status == 2
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    assert named.format(**places) in stderr
    assert not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_a_folder_of_another_run_is_refused(
    suite_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(suite_path, out) == 0
    before = (out / "predictions.jsonl").read_bytes()
    capsys.readouterr()
    assert run(suite_path, out, "--context", "snapshot") == 2
    assert "context 'observed', not 'snapshot'" in capsys.readouterr().err
    assert (out / "predictions.jsonl").read_bytes() == before
    suite_path.write_text(suite_path.read_text().replace("boil water", "boil lead"))
    assert run(suite_path, out) == 2
    assert "suite_sha256" in capsys.readouterr().err
