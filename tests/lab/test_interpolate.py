"""Weights between two checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lab.main import main
from tests.fixtures.models import random_model, save_checkpoint


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("ends")
    first, second = random_model(exit_gate=True), random_model()
    with torch.no_grad():
        for weight in second.parameters():
            weight.add_(0.5)
    return save_checkpoint(folder / "first", first), save_checkpoint(folder / "second", second)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_weights_lie_on_the_line_between(ends, tmp_path, share):
    first, second = ends
    out = tmp_path / "between"
    assert main(["interpolate", str(first), str(second), "--share", str(share), "--out", str(out)]) == 0
    start, end, between = (load_file(folder / "model.safetensors") for folder in (first, second, out))
    assert between.keys() == start.keys() > end.keys()  # the gate
    for name, weight in between.items():
        expected = start[name].float() + share * (end.get(name, start[name]).float() - start[name].float())
        torch.testing.assert_close(weight.float(), expected, atol=0, rtol=2**-7)  # bfloat16


def test_interpolate_heads_missing_from_the_second_are_refused(ends, tmp_path, capsys):
    first = save_checkpoint(tmp_path / "heads", random_model(prediction_heads=True))
    assert main(["interpolate", str(first), str(ends[1]), "--share", "0.5", "--out", str(tmp_path / "out")]) == 2
    assert f"{ends[1]}: must have the weights of {first}, lacks model.heads." in capsys.readouterr().err


@pytest.mark.parametrize(("options", "message"), [
    ([], "must have the weights of"), (["--share", "1.5"], "--share: must be 0 to 1"),
])  # fmt: skip
def test_other_shapes_and_shares_are_refused(ends, tmp_path, capsys, options, message):
    wider = save_checkpoint(tmp_path / "wider", random_model(intermediate_size=96))
    command = ["interpolate", str(wider), str(ends[1]), "--share", "0.5", *options, "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
