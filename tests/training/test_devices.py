"""Presets, devices and the precision of a run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from eval.__main__ import main as evaluate
from loopwm import runtime
from loopwm.records.errors import InputError
from loopwm.text.model.configuration import PRESETS
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.training.config import load_config
from loopwm.text.training.program import TextProgram, model_config
from loopwm.trainer import trainer
from loopwm.trainer.trainer import Trainer
from loopwm.training import __main__ as training
from serve.start import main as serve

CONFIGS = ("configs/text-small.yaml", "configs/reference.yaml")
MILLIONS = {"tiny": 0.44, "mini": 4.5, "reference": 6.9, "small": 11.1, "base": 28.5, "large": 160, "1b": 984}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("preset", PRESETS)
def test_preset_with_every_text_config_keeps_its_size(config: str, preset: str) -> None:
    model = load_config(Path(config), [f"model.preset={preset}"]).model
    with torch.device("meta"):
        parameters = LoopWMForCausalLM(model_config(model, 4096)).num_parameters()
    assert parameters / 1e6 == pytest.approx(MILLIONS[preset], rel=0.03)


def test_help_example_of_training_is_a_valid_configuration() -> None:
    words = shlex.split((training.__doc__ or "").split("accelerate launch ")[1].replace("\\\n", ""))
    config = load_config(Path(words[words.index("--config") + 1]), words[words.index("--out") + 2 :])
    assert config.model.preset == "tiny"


@no_gpu
def test_device_cuda_without_gpu_is_refused() -> None:
    with pytest.raises(InputError, match=r"^run.device: cuda needs a GPU"):
        runtime.use_device("cuda", "run.device")
    assert runtime.use_device("auto") == torch.device("cpu")


@no_gpu
@pytest.mark.parametrize("command", ["serve", "eval"])
def test_commands_with_cuda_without_gpu_end_with_one_line(command, tmp_path, capsys):
    run = ["run", "--model", "loopwm/pretrained", "--suite", "scienceworld-dev", "--context", "observed"]
    if command == "serve":
        status = serve(["--port", "0", "--device", "cuda"])
    else:
        status = evaluate([*run, "--out", str(tmp_path), "--device", "cuda"])
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("error: --device: cuda needs a GPU")
    assert error.count("\n") == 1


@pytest.fixture
def own_accelerator() -> Iterator[None]:
    """Accelerate keeps the precision of a process's first run for all later ones."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_precision_auto_is_measured_once_a_run(config_file, tmp_path, monkeypatch, capsys, own_accelerator):
    """A resumed run keeps what its first start measured, whatever the machine would say now."""
    config = load_config(config_file, ["run.mixed_precision=auto", "run.steps=1"])
    for measured in ("bf16", "no"):
        monkeypatch.setattr(trainer, "faster_precision", lambda measured=measured: measured)
        run = Trainer(config, TextProgram, tmp_path)
        assert run.precision == run.accelerator.mixed_precision == "bf16"
    assert json.loads((tmp_path / "provenance.json").read_text())["precision"] == "bf16"
    run.run()
    assert "M FLOPs a token, bf16 on cpu\n" in capsys.readouterr().out
