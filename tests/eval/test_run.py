"""The commands: results, resuming, refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.commands.compare import compare_runs
from eval.models.base import Copy, Predictor
from eval.scores import predictions
from eval.scores.predictions import Prediction, read_records
from loopwm.records.errors import InputError
from loopwm.records.template import ContextKind, FormatError
from loopwm.records.windows import Window
from tests.fixtures.windows import MakeWindow, WriteSuite, episode

RUN = ["run", "--model", "copy", "--context", "observed", "--batch-size", "4"]

KILLED_IN_FOURTH_BATCH = """
import os, signal, sys
from eval.__main__ import main
from eval.models.base import Copy

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
    assert "| Melt | 13 | 0.0 / " in (out / "report.md").read_text()


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


def test_results_name_every_commit_that_predictions_are_of(
    suite_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_at(commit: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(predictions, "checkout", lambda: {"commit": commit})
        assert run(suite_path, out) == 0
        commits: list[dict[str, Any]] = results(out)["provenance"]["commits"]
        return commits

    out = tmp_path / "out"
    assert run_at("first") == [{"commit": "first"}]
    assert run_at("nothing was lacking") == [{"commit": "first"}]
    lines = (out / "predictions.jsonl").read_text().splitlines(keepends=True)
    (out / "predictions.jsonl").write_text("".join(lines[:-40]))
    assert run_at("second") == [{"commit": "first"}, {"commit": "second"}]
    (out / "predictions.jsonl").write_text("".join(lines[:-40]))
    (out / "commits.json").unlink()  # as in a folder of before commits were kept
    assert run_at("third") == [{}, {"commit": "third"}]


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
    code = "import sys\nfrom eval.__main__ import main\nfrom eval.models import endpoint\n"
    code += "endpoint.ATTEMPTS = 1\nmain(sys.argv[1:])\n"
    code += "sys.exit('torch' in sys.modules)"
    options = ["--model", model, "--suite", str(suite_path), "--out", str(tmp_path / "out")]
    if model == "retrieve":
        options += ["--train-episodes", str(train)]
    if model.startswith("openai:"):
        options += ["--reply-cache", str(tmp_path / "replies.sqlite"), "--request-timeout", "0.01", "--limit", "1"]
    command = [sys.executable, "-c", code, *RUN, *options]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def use(monkeypatch: pytest.MonkeyPatch, predictor: Predictor) -> None:
    """Makes `copy` another predictor."""
    monkeypatch.setattr("eval.models.base.Copy.load", lambda *_: predictor)


class Short(Copy):
    """Reads no goal longer than 40 characters, as a model with a limit does."""

    def predict(
        self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]
    ) -> list[Prediction]:
        for window in windows:
            if len(window["goal"]) > 40:
                error = FormatError("context", "has 41 characters, the limit is 40")
                raise InputError(f"window {window['id']}: {error}") from error
        return super().predict(windows, context_kind, horizons)


def test_a_window_that_cannot_be_shown_is_refused_and_the_others_are_scored(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    windows = [make_window(f"w{i}") for i in range(10)]
    long, null = make_window("long", goal="g" * 41), make_window("null", look=None, inventory=None)
    suite = write_suite([*windows, long, null])
    use(monkeypatch, Short())
    out = tmp_path / "out"
    for _ in range(2):  # the second time nothing is left to predict
        assert run(suite, out, "--context", "snapshot") == 0
        shown = capsys.readouterr().out
        assert "10 of 12 windows scored, 2 refused under `snapshot`.\nExact match at horizon 5: 0.0 (" in shown
        assert "A sample" not in shown
        found = results(out)
        assert found["windows"] == {"asked": 12, "scored": 10, "refused": 2}
        assert found["refused"].keys() == {"long", "null"}
        assert "the limit is 40" in found["refused"]["long"]
        assert {row["n"] for row in found["rows"]} == {10}
        monkeypatch.setattr(Short, "predict", None)
    assert "| long | context: has 41" in (out / "report.md").read_text()


def test_a_run_with_a_refused_window_pairs_with_one_without(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = write_suite([*(make_window(f"w{i}") for i in range(10)), make_window("long", goal="g" * 41)])
    assert run(suite, tmp_path / "all") == 0
    use(monkeypatch, Short())
    assert run(suite, tmp_path / "short") == 0
    assert {d.n for d in compare_runs(tmp_path / "all", tmp_path / "short")} == {10}
    suite = write_suite([make_window("long", goal="g" * 41), make_window("null", look=None, inventory=None)])
    assert run(suite, tmp_path / "null", "--context", "observed") == 0
    monkeypatch.undo()
    assert run(suite, tmp_path / "long", "--context", "snapshot") == 0
    with pytest.raises(InputError, match=r"horizon 1: must have the same windows, got 0 and 0"):
        compare_runs(tmp_path / "null", tmp_path / "long")


def test_errors_that_are_no_windows_end_a_run(
    suite_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> list[Prediction]:
        raise InputError("--model: endpoint: gone")

    monkeypatch.setattr(Copy, "predict", fail)
    assert run(suite_path, tmp_path / "out") == 2
    assert "error: --model: endpoint: gone\n" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["table", "compare"])
def test_results_with_intervals_over_windows_are_refused_until_made_again(
    suite_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    out = tmp_path / "out"
    assert run(suite_path, out) == 0
    old = {name: value for name, value in results(out).items() if name != "intervals"}
    (out / "results.json").write_text(json.dumps(old))
    more = {"table": [], "compare": [str(out)]}
    capsys.readouterr()
    assert main([command, str(out), *more[command]]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "got 'over windows'" in error
    assert run(suite_path, out) == 0
    assert main([command, str(out), *more[command]]) == 0


class Judge(Copy):
    """Predicts a reward of 0.6 and an end at the third action."""

    def predict(
        self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]
    ) -> list[Prediction]:
        found = super().predict(windows, context_kind, horizons)
        return [replace(p, rewards=dict.fromkeys(p.texts, 0.6), ends={k: k == 3 for k in p.texts}) for p in found]


def test_rewards_and_ends_are_scored_where_a_model_predicts_them(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paid = make_window("paid", rewards=[0, 0, 1, 0, 0], dones=[False, False, True, False, False])
    suite = write_suite([paid, make_window("not", rewards=[0, 0, 0, 0, 0])])
    assert run(suite, tmp_path / "without") == 0
    assert not {"reward", "end"} & results(tmp_path / "without")["rows"][0].keys()
    use(monkeypatch, Judge())
    assert run(suite, tmp_path / "out") == 0
    assert run(suite, tmp_path / "out") == 0  # from what was kept
    third = next(r for r in results(tmp_path / "out")["rows"] if (r["family"], r["horizon"]) == ("overall", 3))
    assert third["reward"] == {"n": 2, "accuracy": 0.5, "n_nonzero": 1, "accuracy_nonzero": 1.0}
    assert third["end"] == {"n": 1, "predicted": 2, "precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3)}


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
        (["--suite", "scienceworld-501"], "got 'scienceworld-501'"),
        (["--model", "oracle"], "got 'oracle'"),
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
        (["--model", "openai:nowhere"], "--model"),
        (["--model", "retrieve"], "--train-episodes"),
        (["--train-episodes", "x.jsonl"], "--train-episodes"),
        (["--model", "retrieve", "--train-episodes", "x.jsonl"], "x.jsonl"),
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
    assert "context must be 'observed' as in the folder, got 'snapshot'" in capsys.readouterr().err
    assert (out / "predictions.jsonl").read_bytes() == before
    suite_path.write_text(suite_path.read_text().replace("boil water", "boil lead"))
    assert run(suite_path, out) == 2
    assert "suite_sha256" in capsys.readouterr().err
