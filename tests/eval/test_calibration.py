"""Trust in predictions against how often they are right."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from eval.__main__ import main
from eval.commands.calibration import auroc, calibrate


def test_auroc_equals_comparing_all_pairs() -> None:
    random = np.random.default_rng(0)
    trust, right = random.integers(0, 12, 60) / 11, random.random(60) < 0.4
    pairs = [float(t > f) + float(t == f) / 2 for t in trust[right] for f in trust[~right]]
    assert auroc(trust, right) == pytest.approx(sum(pairs) / len(pairs))
    assert math.isnan(auroc(trust[right], right[right]))


def test_calibration_of_six_predictions_is_that_by_hand() -> None:
    trust = np.array([0.95, 1.0, 0.05, 0.35, 0.31, 0.95])
    right = np.array([True, True, False, True, False, False])
    result = calibrate(trust, right)
    assert (result.n, result.right) == (6, 0.5)
    assert [(b.n, round(b.trust, 3), round(b.right, 3)) for b in result.bins] == [
        (1, 0.05, 0.0), (2, 0.33, 0.5), (3, 0.967, 0.667),
    ]  # fmt: skip
    assert result.ece == pytest.approx((1 * 0.05 + 2 * 0.17 + 3 * 0.3) / 6)
    assert result.right_at == {50: pytest.approx(2 / 3), 80: pytest.approx(3 / 4)}


@pytest.fixture
def runs(checkpoint: Path, suite_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setattr("eval.models.checkpoint.LONGEST_OBSERVATION", 4)
    folders = {}
    for name, model in {"tiny": str(checkpoint), "copy": "copy"}.items():
        folders[name] = tmp_path / name
        command = ["run", "--suite", str(suite_path), "--context", "observed", "--horizons", "1,2", "--limit", "6"]
        assert main([*command, "--model", model, "--out", str(folders[name])]) == 0
    return folders


def test_calibration_of_a_run_has_a_line_a_horizon(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = runs["tiny"] / "predictions.jsonl"
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    for number, line in enumerate(lines):
        line["trust"], line["prediction"] = (0.75, line["target"]) if number % 2 else (0.25, "wrong")
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    assert main(["calibration", str(runs["tiny"])]) == 0
    rows = [[cell.strip(" |") for cell in line.split(" | ")] for line in capsys.readouterr().out.splitlines()]
    suite = json.loads((runs["tiny"] / "results.json").read_text())["suite"]
    assert [row[:4] for row in rows[2:4]] == [["tiny", suite, "1", "6"], ["tiny", suite, "2", "6"]]
    assert rows[4] == ["all", "all", "all", "12", "50.0", "1.000", "0.250", "100.0", "66.7"]
    assert rows[8:] == [["6", "25.0", "0.0"], ["6", "75.0", "100.0"]]
    assert main(["calibration", str(runs["copy"])]) == 2
    assert "copy: trust: missing" in capsys.readouterr().err
