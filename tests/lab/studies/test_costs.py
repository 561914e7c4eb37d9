"""What models and runs cost: FLOPs, parameters, spikes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lab.studies.summary import count_parameters, forward_flops, training_flops
from lab.studies.training_runs import SPIKE_WINDOW, count_spikes, read_training_log
from loopwm.core import DepthPlan
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM

TINY = {**PRESETS["tiny"], "mu_rec": 4.0, "vocab_size": 100, "block_layers": 2, "coda_layers": 3}


@pytest.mark.parametrize("copy_attention", [True, False])
def test_counted_flops_are_those_of_the_products_that_run(copy_attention: bool) -> None:
    """Attention without a cache computes every query against every key, so keys = length."""
    config = LoopWMConfig(**TINY, copy_attention=copy_attention)
    model = LoopWMForCausalLM(config)
    model.set_attn_implementation("eager")  # the counter does not know the fused kernel of the CPU
    for depth in (1, 3):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.randint(9, 100, (2, 16)), depth=depth)
        assert counter.get_total_flops() == 2 * 16 * forward_flops(config, depth, 16)


def test_training_flops_are_those_of_forward_and_truncated_backward() -> None:
    config = LoopWMConfig(**TINY, copy_attention=False)
    model = LoopWMForCausalLM(config)
    model.set_attn_implementation("eager")
    plan = DepthPlan((4, 4), math.ceil(config.mu_rec / 2), (1, 2))
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(9, 100, (2, 16)), depth=plan).logits.sum().backward()
    expected = 2 * 16 * training_flops(config, 4, plan.mu_bwd, 16)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-2)


def test_tied_embeddings_count_once() -> None:
    config = LoopWMConfig(**TINY)
    found, model = count_parameters(config), LoopWMForCausalLM(config)
    assert found.total == sum(p.numel() for p in model.parameters())
    assert found.total - found.without_embeddings == 100 * config.hidden_size


def test_a_spike_stands_out_of_the_losses_before_it() -> None:
    """Losses of 1, 2, 3 in turn have median 2 and median absolute deviation 1: the bar lies at 2 + 4 * 1.4826."""
    calm = [1.0, 2.0, 3.0] * SPIKE_WINDOW
    assert count_spikes(calm) == 0
    assert count_spikes([*calm, 7.9]) == 0
    assert count_spikes([*calm, 8.0]) == 1
    assert count_spikes([*calm, math.nan]) == 1
    assert count_spikes([*calm[: SPIKE_WINDOW - 1], 100.0]) == 0  # nothing to judge by yet
    assert count_spikes([100.0 - i for i in range(200)]) == 0  # a fall is no spike


def test_a_training_log_gives_time_tokens_and_the_last_dev_loss(tmp_path: Path) -> None:
    def step(i: int) -> dict[str, float | str]:
        return {"step": i, "kind": "train", "loss": 1.0, "tokens": 100.0, "tokens_per_s": 50.0, "state_rms": i,
                "mean_depth": 2.0 * i}  # fmt: skip

    records = [step(1), {"step": 1, "kind": "dev", "loss": 3.0}, step(2), {"step": 2, "kind": "dev", "loss": 2.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    facts = read_training_log(tmp_path)
    assert (facts.steps, facts.tokens, facts.seconds, facts.dev_loss) == (2, 200.0, 4.0, 2.5)
    assert (facts.spikes, facts.largest_state_rms, facts.mean_depth, facts.diverged) == (0, 2, 3.0, False)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(records[0]) + "\n")
    with pytest.raises(ValueError, match="holds no dev record"):
        read_training_log(tmp_path)
