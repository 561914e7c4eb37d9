"""Carrying the latent: rows in stages compute what worlds compute step by step."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from loopwm.core.depth import DepthPlan
from loopwm.records import template as template
from loopwm.records.template import Context, Transition
from loopwm.text.data.collate import TreeBatch
from loopwm.text.data.tree import IGNORED, RowPlan, by_stage, trunk_and_branches
from loopwm.text.decoding import Decoder
from loopwm.text.drafts import Lookup, SharedText
from loopwm.text.training.loss import TextObjective, run_rows
from loopwm.text.world import WorldModel
from tests.fixtures.models import random_model
from tests.fixtures.rows import ACTIONS, OBSERVATIONS, every, row_builder, token_episode

PLAN = RowPlan(0, "observed", 1, 2, (every(0, 3), every(1, 2), every(2, 1)), targets_from=1)


def rows_of(builder, episode) -> list:
    return [builder.build(episode, plan) for plan in (PLAN, RowPlan(1, "snapshot", 2, 2, (every(1, 2),), 2))]


def in_row_order(batch: TreeBatch, x_BLD: torch.Tensor) -> list[torch.Tensor]:
    """The values of each row's tokens in the row's own order, whatever the layout."""
    out = []
    for i in range(len(batch.tokens)):
        columns = (batch.branch[i] >= 0).nonzero()[:, 0]
        out.append(x_BLD[i, columns[batch.place[i, columns].argsort()]])
    return out


def test_stages_without_a_projection_are_the_single_pass(builder, episode):
    """Outputs and gradients, with rows of different depth and noise."""
    staged = random_model(propagate="latent")
    torch.nn.init.zeros_(staged.model.propagation.weight)
    plain = random_model()
    plain.load_state_dict({k: v for k, v in staged.state_dict().items() if "propagation" not in k})
    rows = rows_of(builder, episode)
    results = []
    for model, layout in ((plain, trunk_and_branches), (staged, by_stage)):
        batch = TreeBatch.collate(rows, [0, 1], 0, layout)
        plan = DepthPlan(loops=(4, 2), mu_bwd=2, noise_seeds=(5, 6), places=batch.place)
        out = run_rows(model.model, batch, plan)
        TextObjective(model)(batch, plan, batch.targets)[0].backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if "propagation" not in n}
        results.append(([in_row_order(batch, x) for x in (out.last_hidden_state, out.state)], gradients))
    for ours, theirs in zip(*(outputs for outputs, _ in results), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(
            gradient, results[1][1][name], atol=1e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert staged.model.propagation.weight.grad.any()


def test_a_fresh_latent_model_is_the_one_without(builder, episode):
    with torch.random.fork_rng():
        from loopwm.text.model.configuration import PRESETS, LoopWMConfig
        from loopwm.text.model.modeling import LoopWMForCausalLM

        fresh = LoopWMForCausalLM(LoopWMConfig(vocab_size=64, **PRESETS["tiny"], propagate="latent"))
    assert not fresh.model.propagation.weight.any()


@pytest.mark.parametrize("propagating", [True, False])
def test_a_loss_eight_steps_later_reaches_a_step_through_the_latent(tokenizer, builder, propagating):
    """At T = 2 mu_bwd, where half of the loops carry no gradient and the h^(0) path is cut. Attention is silenced, so
    that nothing but the carried latent joins two steps: without the projection no gradient arrives."""
    steps = 11
    episode = token_episode(tokenizer, [f"o {i}" for i in range(steps)], [f"a {i}" for i in range(steps)])
    model = random_model(propagate="latent")
    for layer in (*model.model.core.prelude, *model.model.core.block, *model.model.core.coda):
        torch.nn.init.zeros_(layer.attention.o_proj.weight)
    if not propagating:
        torch.nn.init.zeros_(model.model.propagation.weight)
    seen: list[torch.Tensor] = []

    def keep(_module, _inputs, output) -> None:
        output.retain_grad()
        seen.append(output)

    hook = model.model.embed_tokens.register_forward_hook(keep)
    row = builder.build(episode, RowPlan(0, "observed", 1, 0, (every(0, 10),), 1))
    batch = TreeBatch.collate([row], [0], 0, by_stage)
    plan = DepthPlan(loops=(4,), mu_bwd=2, noise_seeds=(1,), places=batch.place)
    out = run_rows(model.model, batch, plan)
    hook.remove()
    batch.steps.at_slots(out.latent)[9].square().sum().backward()
    reached = seen[1].grad is not None and bool(seen[1].grad.any())
    assert reached == propagating


CARRYING = [
    {"state_slots": 2},
    {"slots_in_trunk": False},
    {"propagate": "latent", "slots_in_trunk": False},
    {"propagate": "latent"},
    {"propagate": "latent", "state_slots": 2},
    {"decode_sees": "state"},
    {"propagate": "latent", "decode_sees": "state", "state_slots": 2},
]


@pytest.mark.parametrize("overrides", CARRYING, ids=str)
def test_a_world_computes_the_latents_and_logits_of_training(tokenizer, episode, overrides):
    """Every horizon of every branch: encode, advance, and the teacher-forced decode of the observation."""
    model = random_model(**overrides)
    world_model = WorldModel(model, tokenizer)
    layout = by_stage if model.config.propagate == "latent" else trunk_and_branches
    batch = TreeBatch.collate(rows_of(row_builder(tokenizer, model.config.slots), episode), [0, 1], 0, layout)
    with torch.no_grad():
        out = run_rows(model.model, batch, 3)
    h = batch.steps.at_slots(out.latent)
    line = 0
    for number, (start, horizons) in enumerate(((b.step, b.deepest) for b in PLAN.branches), start=1):
        history = tuple(Transition(ACTIONS[i], OBSERVATIONS[i]) for i in range(1, start + 1))
        world = world_model.encode([Context("find a tree", OBSERVATIONS[0], history)], depth=3)
        for k in range(horizons + 1):
            if k:
                world = world_model.advance(world, [ACTIONS[start + k]])
                here = (batch.branch[0] == number) & (batch.decode[0] == k)
                decoded = teacher_forced(world_model, world, OBSERVATIONS[start + k])
                expected = out.last_hidden_state[0, here][:-1]  # nothing follows the end
                torch.testing.assert_close(decoded, expected, atol=2e-4, rtol=1e-3)
                labels = batch.label[0, here][:-1]
                assert (labels != IGNORED).all()
            torch.testing.assert_close(world.latent[0], h[line], atol=1e-4, rtol=1e-3)
            line += 1


@pytest.mark.parametrize("state_slots", [1, 2])
def test_a_world_one_step_on_has_the_latents_of_the_trunk(tokenizer, episode, state_slots):
    model = random_model(state_slots=state_slots)
    world_model = WorldModel(model, tokenizer)
    batch = TreeBatch.collate(rows_of(row_builder(tokenizer, model.config.slots), episode), [0, 1], 0)
    with torch.no_grad():
        h = batch.trunk_steps.at_slots(run_rows(model.model, batch, 3).latent)
    assert batch.trunk_steps.row.tolist() == [0, 0, 1]
    assert batch.trunk_steps.reward.tolist() == [10, 20, 20]
    for step in (1, 2):
        history = tuple(Transition(ACTIONS[i], OBSERVATIONS[i]) for i in range(1, step))
        world = world_model.encode([Context("find a tree", OBSERVATIONS[0], history)], depth=3)
        advanced = world_model.advance(world, [ACTIONS[step]])
        torch.testing.assert_close(advanced.latent[0], h[step - 1], atol=1e-4, rtol=1e-3)


@torch.no_grad()
def teacher_forced(world_model: WorldModel, world, observation: str) -> torch.Tensor:
    """Final hidden states of a decode that is told its own output: `decode`'s state, fed with a known text."""
    seen = []
    hook = world_model.model.model.register_forward_hook(
        lambda _m, _i, out: seen.append(out.last_hidden_state[0, -1].clone())
    )
    ids = world_model.tokenizer(observation + template.END, add_special_tokens=False)["input_ids"]
    answers = iter(ids)
    head = world_model.model.lm_head

    def tell(_module, _inputs, output) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor([[next(answers)]]), output.shape[-1]).float()

    told = head.register_forward_hook(tell)
    forward = partial(world_model._next_tokens, world.depth)
    decoder = Decoder(forward, world_model._obs, world_model._end, len(ids), drafts=False)
    with torch.inference_mode():
        (text,) = decoder.greedy([world_model.before_decoding(world)], [Lookup(SharedText(), "")])
    assert world_model.tokenizer.decode(text.tokens) == observation
    hook.remove()
    told.remove()
    return torch.stack(seen)


def test_carrying_changes_what_is_computed(tokenizer):
    """Otherwise the comparisons above could not tell a carried latent from a forgotten one."""
    seen = []
    for overrides in ({}, {"propagate": "latent"}):
        model = random_model(propagate="latent")
        twin = random_model(**overrides)
        twin.load_state_dict(model.state_dict() if overrides else without_projection(model))
        world = WorldModel(twin, tokenizer).encode([Context("g", "o")], depth=2)
        seen.append(WorldModel(twin, tokenizer).advance(world, ["wait"]).latent)
    assert (seen[0] - seen[1]).abs().max() > 1e-2


def without_projection(model) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in model.state_dict().items() if "propagation" not in name}


def test_the_latent_stays_finite_and_bounded_over_fifty_steps(tokenizer):
    """Even under a projection far larger than training leaves: the norm on e bounds what the loop is driven by."""
    model = random_model(propagate="latent")
    with torch.no_grad():
        model.model.propagation.weight.mul_(30.0)
    world_model = WorldModel(model, tokenizer)
    world = world_model.encode([Context("find a tree", "You are in a room.")], depth=4)
    sizes = []
    for step in range(50):
        world = world_model.advance(world, [f"go to room {step % 7}"])
        assert world.latent.isfinite().all()
        sizes.append(world.latent.square().mean().sqrt().item())
    assert max(sizes[10:]) < 2 * max(sizes[:10])


def test_rows_laid_out_for_one_pass_are_refused_where_a_latent_is_carried(builder, episode):
    batch = TreeBatch.collate(rows_of(builder, episode), [0, 1], 0, trunk_and_branches)
    with pytest.raises(ValueError, match="by_stage"):
        run_rows(random_model(propagate="latent").model, batch, 2)
