"""The wording of a context tells foreign environments from those of the training data."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from lab.data.foreign_contexts import foreign_starts
from lab.main import main
from loopwm.records.files import PACKAGED


def measured(capsys: pytest.CaptureFixture[str], model: Path) -> tuple[float, int, int]:
    """Return the AUROC, and how many dev windows and foreign contexts are above the checkpoint's limit."""
    assert main(["foreign-contexts", "--model", str(model)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    area, above = re.match(r"AUROC ([\d.]+); (\d+) of 600 dev windows above", first).groups()
    return float(area), int(above), sum(map(int, re.findall(r": (\d+) of", second)))


def test_foreign_contexts_are_flagged_and_dev_windows_not(capsys):
    area, dev, foreign = measured(capsys, PACKAGED)
    assert area >= 0.95
    assert dev == 0
    assert foreign >= 0.95 * len(foreign_starts())


def test_a_limit_that_is_too_low_flags_dev_windows(capsys, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(PACKAGED / name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tokens_per_byte": 0.13}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert measured(capsys, tmp_path)[1] > 100


def test_a_checkpoint_without_a_limit_is_refused(capsys, tmp_path):
    shutil.copy(PACKAGED / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "loopwm"}')
    assert main(["foreign-contexts", "--model", str(tmp_path)]) == 2
    assert "must know tokens_per_byte" in capsys.readouterr().err


def test_foreign_contexts_are_two_hundred_different_ones():
    assert len({(one["goal"], one["observation"]) for one in foreign_starts()}) == 200
