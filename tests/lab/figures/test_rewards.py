"""Rewards and ends of stored predictions are predicted again, and the texts must be those of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eval.__main__ import main as evaluate
from eval.models.checkpoint import checkpoint_hash
from lab.__main__ import main
from lab.figures.predictions import Rescored, keep
from loopwm.records.files import read_json, read_json_lines
from tests.fixtures.models import random_model, save_checkpoint

SUITE = "alfworld-probe"
NAME = f"{SUITE}--observed--loopwm-small"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Results and predictions of a tiny model, under the name of the one that ships."""
    torch.manual_seed(0)
    save_checkpoint(tmp_path / "model", random_model(prediction_heads=True))
    run = tmp_path / "run"
    arguments = f"run --model {tmp_path / 'model'} --suite {SUITE} --context observed --horizons 1,2 --limit 2"
    assert evaluate([*arguments.split(), "--out", str(run)]) == 0
    for name in ("results.json", "run.json"):
        (run / name).write_text(json.dumps({**read_json(run / name), "model": "loopwm/pretrained"}))
    keep(run, tmp_path / "data")
    return tmp_path / "data"


def with_other(model: Path, out: Path, part: str) -> Path:
    """Save the model with other weights in the parts of this name."""
    torch.manual_seed(0)
    other = random_model(prediction_heads=True)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if part in name:
                weight.add_(torch.linspace(-9, 9, weight.numel()).view_as(weight))
    save_checkpoint(out, other)
    return out


def test_rewards_are_those_of_the_new_weights_and_results_follow(stored, tmp_path) -> None:
    path = stored / f"predictions/{NAME}.jsonl.xz"
    before = [line for _, line in read_json_lines(path)]
    model = with_other(tmp_path / "model", tmp_path / "other", "heads.points")
    assert main(["predict-rewards", "--model", str(model), "--data", str(stored)]) == 0
    after = [line for _, line in read_json_lines(path)]
    assert after[0]["provenance"]["model_sha256"] == checkpoint_hash(model) != checkpoint_hash(tmp_path / "model")
    out = tmp_path / "again"
    arguments = f"run --model {model} --suite {SUITE} --context observed --horizons 1,2 --limit 2"
    assert evaluate([*arguments.split(), "--out", str(out)]) == 0
    records = {(line["id"], line["horizon"]): line for _, line in read_json_lines(out / "predictions.jsonl")}
    assert len(after) == len(before) == 5
    for old, new in zip(before[1:], after[1:], strict=True):
        expected = records[new["id"], new["horizon"]]
        assert (new["reward"], new["ended"]) == (expected["reward"], expected["ended"])
        assert new == {**old, "reward": new["reward"], "ended": new["ended"]}
    assert any(old["reward"] != new["reward"] for old, new in zip(before[1:], after[1:], strict=True))
    assert read_json(stored / f"{NAME}.json") == Rescored.read(path).stored()


def test_a_model_of_other_texts_is_refused_and_nothing_changes(stored, tmp_path, capsys) -> None:
    path = stored / f"predictions/{NAME}.jsonl.xz"
    before = path.read_bytes()
    model = with_other(tmp_path / "model", tmp_path / "other", "coda")
    assert main(["predict-rewards", "--model", str(model), "--data", str(stored)]) == 2
    assert "another text than stored; evaluate the model" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert main(["predict-rewards", "--model", str(model), "--data", str(tmp_path / "run")]) == 2
