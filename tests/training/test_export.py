"""A checkpoint becomes a model while its run goes on."""

from __future__ import annotations

import pytest
import torch

from loopwm.text.export_command import main
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.training.config import load_config
from loopwm.text.training.program import TextProgram
from loopwm.trainer.trainer import Trainer


@pytest.mark.parametrize(("average", "bag"), [(0.0, 0.0), (0.5, 1.0)])
def test_the_last_checkpoint_exports_what_the_run_exports(config_file, tmp_path, capsys, average, bag):
    run = tmp_path / "run"
    overrides = [
        f"optimizer.average={average}",
        f"objective.bag_coef={bag}",
        "data.dev=[]",
    ]
    overrides += ["data.dev=[]", "run={steps: 3, mixed_precision: 'no'}"]
    Trainer(load_config(config_file, overrides), TextProgram, run).run()
    checkpoint = run / "checkpoints" / "step-00000003"
    assert main(["--checkpoint", str(checkpoint), "--out", str(tmp_path / "apart" / "model")]) == 0
    assert main(["--checkpoint", str(checkpoint), "--out", str(run)]) == 2
    assert f"--out: {run} exists; name a new folder" in capsys.readouterr().err
    one, other = (LoopWMForCausalLM.from_pretrained(f) for f in (run / "model", tmp_path / "apart" / "model"))
    assert one.config.mu_rec == other.config.mu_rec
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name


def test_what_is_no_checkpoint_is_named_in_one_line(config_file, tmp_path, capsys):
    Trainer(load_config(config_file, ["run.steps=1", "data.dev=[]"]), TextProgram, tmp_path).run()
    missing = tmp_path / "checkpoints" / "step-00000009"
    assert main(["--checkpoint", str(missing), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {missing / 'model.safetensors'}: ")
    assert not (tmp_path / "out").exists()
