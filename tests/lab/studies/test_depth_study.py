"""The depth study as a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.models.checkpoint import CheckpointPredictor
from eval.scores.suites import load_suite
from lab.__main__ import main
from lab.studies.window_scores import nll


def command(checkpoint: Path, windows_file: Path, out: Path, *options: str) -> list[str]:
    arguments = ["study", "depth", "--model", str(checkpoint), "--windows", str(windows_file), "--horizons", "1,2"]
    return [*arguments, "--context", "observed", "--out", str(out), *options]


def test_depths_up_to_twice_the_mean_are_compared_with_the_default(
    checkpoint: Path, windows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.models.checkpoint.LONGEST_OBSERVATION", 4)
    arguments = command(checkpoint, windows_file, tmp_path / "out")
    assert main(arguments) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["default_depth"] == 2
    assert list(found["flops_per_token"]) == ["1", "2", "3", "4"]
    assert {d["arm"] for d in found["differences"]} == {"T=1", "T=3", "T=4"}
    losses = {m["arm"]: m["mean"] for m in found["means"] if (m["metric"], m["horizon"]) == ("nats", 2)}
    windows = list(load_suite(str(windows_file)).windows)
    for depth in (1, 4):
        nats = [row[2][0] for row in nll(CheckpointPredictor(checkpoint, depth), windows, "observed", (2,))]
        assert losses[f"T={depth}"] == pytest.approx(sum(nats) / len(nats), rel=1e-4)
    assert losses["T=1"] != pytest.approx(losses["T=4"], rel=1e-3)
    assert (tmp_path / "out" / "plot.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(CheckpointPredictor, "predict", None)
    monkeypatch.setattr(CheckpointPredictor, "begin", None)
    assert main(arguments) == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--depths", "9"], "--depth: must be 1 to max_loops = 6, got 9"),
        (["--depths", "x"], "--depths"),
        (["--model", "nowhere"], "--model: must be a checkpoint folder, got 'nowhere'"),
    ],
)
def test_bad_arguments_are_one_line_and_status_two(
    checkpoint: Path,
    windows_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    named: str,
) -> None:
    try:
        status = main(command(checkpoint, windows_file, tmp_path / "out", *options))
    except SystemExit as stop:  # argparse
        status = int(stop.code or 0)
    error = capsys.readouterr().err
    assert status == 2
    assert named in error
    assert not (tmp_path / "out").exists()
