"""Tabulated costs are those of what is allocated."""

from __future__ import annotations

import pytest
import torch

from lab import scaling
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.trainer.config import OptimizerConfig
from loopwm.trainer.optimizer import build_optimizers
from serve.engine.forward import ModelRunner

SHAPES = [
    {},
    {"num_key_value_heads": 1, "block_layers": 2},
    {"copy_attention": False, "coda_layers": 3},
    {"prediction_heads": True, "reward_attention": True},
]


def small(**changed) -> LoopWMForCausalLM:
    return LoopWMForCausalLM(LoopWMConfig(**{**PRESETS["tiny"], "vocab_size": 100, **changed}))


@pytest.mark.parametrize("changed", SHAPES)
@pytest.mark.parametrize("loops", [1, 3])
def test_kv_bytes_are_those_of_a_cached_token(changed, loops):
    model = small(**changed).eval()
    assert scaling.kv_bytes(model.config, loops, scaling.FLOAT32) == ModelRunner(model).token_bytes(loops)


@pytest.mark.parametrize("changed", SHAPES)
def test_training_bytes_are_those_after_a_step(changed):
    model = small(**changed)
    optimizers = build_optimizers(model, OptimizerConfig())
    model(torch.tensor([[9, 10, 11]]), depth=2).logits.sum().backward()
    for parameter in model.parameters():  # heads that this loss does not reach have none
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for optimizer in optimizers:
        optimizer.step()
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    tensors = [value for state in states for name, value in state.items() if name != "step"]
    tensors += [tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad)]
    assert scaling.training_bytes(model, averaged=False) == sum(tensor.nbytes for tensor in tensors)


def test_gpu_hours_follow_from_flops_and_rate():
    costs = scaling.Costs(1, 1, 1, training_flops=6e9, serving_flops=2e9)
    assert costs.gpu_hours(10**10, 4e14) == pytest.approx(10**10 * 6e9 / 4e14 / 3600)
