"""GPUs for agents, by hand: what they keep, what they read and what they compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import serving_limits
from lab.main import main
from lab.serving_limits import Gpu, Load, Model, limits, token_seconds
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM

GPU = Gpu(memory=1000.0, bandwidth=50.0, flops=40.0, share=0.5)
LOAD = Load(context=10, read=2, written=3, seconds=4.0, batch=5)
MODEL = Model(weights=200, pass_bytes=600, kv=8, flops=6.0)


def test_limits_are_those_of_a_sheet_of_paper():
    assert limits(MODEL, LOAD, GPU) == {
        "memory": 8 * (10 + 2 + 3) / (1000 - 200),
        "bandwidth": 3 * (8 * 10 + 600 / 5) / (50 * 0.5 * 4),
        "FLOPs": (2 + 3) * 6 / (40 * 0.5 * 4),
    }
    assert token_seconds(MODEL, LOAD, GPU) == (600 + 8 * 10) / (50 * 0.5)


def test_a_shared_start_saves_memory_and_nothing_else():
    alone, shared = limits(MODEL, LOAD, GPU), limits(MODEL, replace(LOAD, shared=0.5), GPU)
    assert shared["memory"] == 8 * (5 + 2 + 3) / 800
    assert (shared["bandwidth"], shared["FLOPs"]) == (alone["bandwidth"], alone["FLOPs"])


def test_memory_below_the_weights_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serving-limits", "--memory", "1e6"]) == 2
    assert "--memory: must be above the" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", [("serving-limits", "--seconds"), ("serving-limits", "--share"), ("scaling", "--share")]
)
def test_zero_rates_are_refused(capsys: pytest.CaptureFixture[str], given: tuple[str, str]) -> None:
    with pytest.raises(SystemExit):
        main([*given, "0"])
    assert f"argument {given[1]}: must be a number > 0, got '0'" in capsys.readouterr().err


@pytest.mark.parametrize("depth", [1, 3])
def test_a_pass_reads_the_block_once_a_loop(depth):
    shape: dict[str, Any] = {**PRESETS["tiny"], "vocab_size": 100}
    config = LoopWMConfig(**shape)
    model = LoopWMForCausalLM._from_config(config, dtype=torch.bfloat16)
    block = sum(weight.nbytes for weight in model.model.core.block.parameters())
    whole = sum(weight.nbytes for weight in model.parameters())
    costs = Model.of(config, depth, 10)
    assert (costs.weights, costs.pass_bytes) == (whole, whole + (depth - 1) * block)


def test_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "scaling.svg"
    assert main(["serving-limits", "--picture", str(picture)]) == 0
    assert capsys.readouterr().out.strip() in Path("docs/scaling.md").read_text()
    assert picture.read_text() == Path("docs/scaling.svg").read_text()
    assert serving_limits.EXAMPLE.endswith("--picture docs/scaling.svg")
