"""Counted FLOPs are those of the products that run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from loopwm.core.depth import DepthPlan
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.flops import forward_flops, row_flops, training_flops
from loopwm.text.model.modeling import LoopWMForCausalLM

TINY = {**PRESETS["tiny"], "mu_rec": 4.0, "vocab_size": 100, "block_layers": 2, "coda_layers": 3}


def eager(config: LoopWMConfig) -> LoopWMForCausalLM:
    """Return a model whose attention the counter knows, which is not so of the fused kernel of the CPU."""
    model = LoopWMForCausalLM(config)
    model.set_attn_implementation("eager")
    return model


REWARDS = {"prediction_heads": True, "reward_attention": True, "num_key_value_heads": 1}


@pytest.mark.parametrize("changed", [{}, {"copy_attention": False}, {"num_key_value_heads": 1}, REWARDS])
def test_forward_flops_are_those_of_the_products_that_run(changed: dict[str, Any]) -> None:
    """Attention without a cache computes every query against every key, so keys = length."""
    config = LoopWMConfig(**{**TINY, **changed})
    model = eager(config)
    for depth in (1, 3):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.randint(9, 100, (2, 16)), depth=depth)
        assert counter.get_total_flops() == 2 * 16 * forward_flops(config, depth, 16)


def test_training_flops_are_those_of_forward_and_truncated_backward() -> None:
    config = LoopWMConfig(**TINY, copy_attention=False)
    plan = DepthPlan((4, 4), math.ceil(config.mu_rec / 2), (1, 2))
    with FlopCounterMode(display=False) as counter:
        eager(config)(torch.randint(9, 100, (2, 16)), depth=plan).logits.sum().backward()
    expected = 2 * 16 * training_flops(config, 4, plan.mu_bwd, 16)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-2)


def test_row_flops_of_equal_tokens_are_training_flops() -> None:
    config = LoopWMConfig(**TINY)
    for loops in (1, 2, 5):
        found = row_flops(config, 7.0, 7.0 * 16, 7.0, loops, min(loops, 2))
        assert found == 7 * training_flops(config, loops, 2, 16)


def test_row_flops_without_targets_leave_logits_out() -> None:
    config = LoopWMConfig(**TINY)
    row = torch.tensor([7.0, 7.0]), torch.tensor([28.0, 28.0]), torch.tensor([7.0, 3.0])
    whole, fewer = row_flops(config, *row, torch.tensor([3.0, 3.0]), torch.tensor([2.0, 2.0])).tolist()
    assert whole - fewer == 3 * 4 * 2 * config.hidden_size * 100
