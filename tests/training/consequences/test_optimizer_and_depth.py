"""Rates, optimisers and depths are those of the configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import pytest
import torch
from torch import Tensor

from loopwm.core.depth import DepthPlan
from loopwm.text.data.data_loader import LoaderState
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.training.loss import TextObjective
from tests.training.consequences.watched import RATES, Update, briefly, program_of, shows


@shows("optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.decay_share", "run.steps")
def test_every_group_of_every_optimiser_steps_at_the_rate_of_the_schedule(watched):
    assert {update.kind for update in watched.updates} == {"Muon", "AdamW"}
    for kind in ("Muon", "AdamW"):
        for update, share in zip(watched.steps_of(kind), RATES, strict=True):
            assert [group["lr"] for group in update.groups] == pytest.approx([0.01 * share] * len(update.groups))


@shows("optimizer.clip_norm")
def test_no_gradient_is_longer_than_clip_norm_and_a_shorter_one_is_left_alone(watched, config_file, tmp_path):
    for step in range(8):
        norm = math.sqrt(sum(float(g.square().sum()) for g in watched.gradient(step).values()))
        assert norm == pytest.approx(0.05, rel=1e-3)
    assert min(record["grad_norm"] for record in watched.records("train")) > 0.1
    free = briefly(config_file, tmp_path / "free", "optimizer.clip_norm=1e6")
    for step, record in enumerate(free.records("train")):
        norm = math.sqrt(sum(float(g.square().sum()) for g in free.gradient(step).values()))
        assert norm == pytest.approx(record["grad_norm"], rel=1e-4)


def adamw(update: Update, past: Sequence[Update], beta1: float, beta2: float, decay: float) -> dict[str, Tensor]:
    """Where a step of AdamW leads to (Loshchilov and Hutter), by the gradients of all steps so far."""
    out = {}
    rate, steps = update.groups[0]["lr"], [*past, update]
    for name, before in update.before.items():
        g = [step.gradient[name].double() for step in steps]
        n = len(g)
        mean = sum((1 - beta1) * beta1 ** (n - 1 - i) * x for i, x in enumerate(g)) / (1 - beta1**n)
        square = sum((1 - beta2) * beta2 ** (n - 1 - i) * x**2 for i, x in enumerate(g)) / (1 - beta2**n)
        decayed = decay if name.endswith("_proj.weight") else 0.0
        out[name] = (before * (1 - rate * decayed) - rate * mean / (square.sqrt() + 1e-10)).float()
    return out


@shows("optimizer.beta1", "optimizer.beta2")
def test_embeddings_norms_and_injection_follow_adamw_with_these_betas_and_without_decay(watched):
    steps = watched.steps_of("AdamW")
    assert "model.model.embed_tokens.weight" in steps[0].before
    assert not any(name.endswith("_proj.weight") for name in steps[0].before)
    for i in range(3):
        expected = adamw(steps[i], steps[:i], 0.8, 0.7, decay=0.0)
        for name, after in steps[i].after.items():
            torch.testing.assert_close(after, expected[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@shows("optimizer.name", "optimizer.weight_decay")
def test_adamw_for_all_shrinks_the_matrices_of_layers_and_nothing_else(config_file, tmp_path):
    run = briefly(config_file, tmp_path, "optimizer={name: adamw, weight_decay: 20.0, learning_rate: 0.01}")
    assert {update.kind for update in run.updates} == {"AdamW"}
    first = run.updates[0]
    assert len(first.before) == len(run.names)
    expected = adamw(first, [], 0.9, 0.95, decay=20.0)
    for name, after in first.after.items():
        torch.testing.assert_close(after, expected[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@shows("optimizer.momentum")
def test_muon_averages_gradients_with_this_momentum_and_decays_its_matrices(watched):
    steps = watched.steps_of("Muon")
    assert [{group["weight_decay"] for group in update.groups} for update in steps] == [{0.3}] * 8
    average = {name: torch.zeros_like(p) for name, p in steps[0].before.items()}
    for update in steps[:3]:
        for name, g in update.gradient.items():
            average[name] = 0.6 * average[name] + 0.4 * g
            torch.testing.assert_close(update.state[name]["momentum_buffer"], average[name])


@shows("optimizer.average")
def test_what_is_evaluated_and_exported_is_the_average_of_the_weights(config_file, dev_shards, tmp_path):
    more = ["optimizer.average=0.75", "run={steps: 3, eval_every: 3, eval_batches: 1, mixed_precision: 'no'}"]
    run = briefly(config_file, tmp_path, *more, f"data.dev=[{dev_shards}]")
    exported = LoopWMForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    own = run.trainer.objective.state_dict()
    moved = False
    for kind in ("Muon", "AdamW"):
        steps = run.steps_of(kind)
        for name in steps[0].after:
            average = steps[0].after[name]
            for update in steps[1:]:
                average = 0.75 * average + 0.25 * update.after[name]
            short = name.removeprefix("model.")
            torch.testing.assert_close(exported[short].float(), average.bfloat16().float(), rtol=0.02, atol=1e-4)
            torch.testing.assert_close(own[name], steps[-1].after[name])  # training goes on from its own weights
            moved |= not torch.allclose(average, steps[-1].after[name], atol=1e-3)
    assert moved
    plain = TextObjective(LoopWMForCausalLM.from_pretrained(tmp_path / "model").float()).eval()
    run.trainer.average = None
    run.trainer.objective.load_state_dict(plain.state_dict(), strict=False)
    assert run.records("dev")[0]["loss"] == pytest.approx(run.trainer.evaluate()["loss"], rel=1e-2)


@shows("depth.ramp_start", "depth.ramp_steps", "depth.backward_loops", "run.seed")
def test_depths_grow_over_the_ramp_and_their_last_loops_carry_gradients(watched):
    means = [1.0, 1.0, 1.0, 1.75, 2.5, 3.25, 4.0, 4.0]
    longest = 0
    for step, (forwards, mean) in enumerate(zip(watched.training_steps(), means, strict=True)):
        for forward in forwards:
            assert forward.depth.mu_bwd == 3
            expected = DepthPlan.sample(5, step, forward.batch.row_ids, mean, 6)
            assert forward.depth.loops == expected.loops
            assert forward.depth.noise_seeds == expected.noise_seeds
            longest = max(longest, *forward.depth.loops)
    assert longest > 4


@shows("depth.sampling")
@pytest.mark.parametrize("sampling", ["per_sequence", "per_batch", "fixed"])
def test_rows_draw_depths_alone_together_or_not_at_all(config_file, sampling):
    program = program_of(config_file, f"depth.sampling={sampling}", "batch={rows: 24, tokens: 64, micro_batches: 4}")
    steps = islice(program.global_batches(LoaderState()), 6)
    depths = [[program.depth_plan(i, batch).loops for batch in batches] for i, (batches, _) in enumerate(steps)]
    in_a_batch = max(len(set(loops)) for step in depths for loops in step)
    in_a_step = max(len({n for loops in step for n in loops}) for step in depths)
    assert (in_a_batch > 1, in_a_step > 1) == {
        "per_sequence": (True, True),
        "per_batch": (False, True),
        "fixed": (False, False),
    }[sampling]
