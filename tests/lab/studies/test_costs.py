"""What models and runs cost: parameters, spikes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lab.studies.summary import count_parameters
from lab.studies.training_runs import SPIKE_WINDOW, count_spikes, read_training_log
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM

TINY = {**PRESETS["tiny"], "mu_rec": 4.0, "vocab_size": 100, "block_layers": 2, "coda_layers": 3}


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
