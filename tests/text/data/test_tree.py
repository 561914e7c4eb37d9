from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from loopwm.core.depth import DepthPlan
from loopwm.records import template as template
from loopwm.records.template import Context, StateSlots, Transition
from loopwm.records.token_episode import INVENTORY, LOOK
from loopwm.text.data.collate import TreeBatch, branch_mask
from loopwm.text.data.tree import IGNORED, QUERY_HORIZON, Branch, RowPlan, by_stage, trunk_and_branches
from loopwm.text.training.config import ObjectiveConfig
from loopwm.text.training.loss import TextObjective, row_mask
from tests.fixtures.models import random_model
from tests.fixtures.rows import ACTIONS, OBSERVATIONS, episode_of_texts, every, row_builder, texts_of


def target_losses(model, batch: TreeBatch, depth: int) -> torch.Tensor:
    """Cross-entropy at every target of a batch, (B, L), zero elsewhere."""
    with torch.no_grad():
        out = model.model(batch.tokens, batch.attention_mask(), batch.positions, use_cache=False, depth=depth)
        logits = model.lm_head(out.last_hidden_state).transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, batch.label, ignore_index=IGNORED, reduction="none")


def prompt_loss(model, tokenizer, context: Context, actions: list[str], observation: str, depth: int) -> float:
    """Summed loss of an observation after a plain prompt, as it is served: no tree, no mask."""
    text = template.render_prompt(context, actions, model.config.slots)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = tokenizer(observation + template.END, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer]), depth=depth).logits[0, len(prompt) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()


SHOWN = {
    "observed": {},
    "briefed": {"hidden_state": "hidden 0"},
    "snapshot": {"look": "look 0", "inventory": "look 0"},
    "full": {"look": "look 0", "inventory": "look 0", "hidden_state": "hidden 0"},
}


def context_after(step: int, context_kind: str) -> Context:
    steps = tuple(Transition(ACTIONS[i], OBSERVATIONS[i]) for i in range(1, step + 1))
    return Context("find a tree", OBSERVATIONS[0], steps, **SHOWN[context_kind])


@pytest.mark.parametrize("slots", [StateSlots(), StateSlots(2), StateSlots(2, in_trunk=False)], ids=str)
@pytest.mark.parametrize("context_kind", SHOWN)
def test_each_horizon_of_a_branch_costs_what_the_same_actions_cost_alone(tokenizer, episode, context_kind, slots):
    """Branches at several steps and their side branches do not see each other, and see the trunk up to their step."""
    model = random_model(state_slots=slots.count, slots_in_trunk=slots.in_trunk)
    builder = row_builder(tokenizer, slots)
    plan = RowPlan(0, context_kind, 1, 3, (every(0, 3), every(1, 2), every(2, 1)), targets_from=1)
    row = builder.build(episode, plan)
    padded = builder.build(episode, RowPlan(1, "observed", 2, 1, (every(1, 2),), targets_from=None))
    batch = TreeBatch.collate([row, padded], [0, 1], pad_id=0)
    losses = target_losses(model, batch, depth=3)
    for number, branch in enumerate(plan.branches, start=1):
        start = branch.step
        for k in branch.decoded:
            here = (batch.branch[0] == number) & (batch.horizon[0] == k) & (batch.label[0] != IGNORED)
            actions = ACTIONS[start + 1 : start + k + 1]
            expected = prompt_loss(
                model, tokenizer, context_after(start, context_kind), actions, OBSERVATIONS[start + k], 3
            )
            assert losses[0][here].sum().item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("context_kind", SHOWN)
def test_each_step_of_the_trunk_costs_what_it_costs_as_a_served_prompt_at_horizon_1(tokenizer, episode, context_kind):
    model = random_model(state_slots=2)
    row = row_builder(tokenizer, model.config.slots).build(episode, RowPlan(0, context_kind, 1, 3, (), targets_from=2))
    losses = target_losses(model, TreeBatch.collate([row], [0], pad_id=0), depth=3)[0]
    ends = [i for i, token in enumerate(row.tokens) if token == tokenizer.eos_token_id]
    for step in (2, 3):
        expected = prompt_loss(
            model, tokenizer, context_after(step - 1, context_kind), [ACTIONS[step]], OBSERVATIONS[step], 3
        )  # fmt: skip
        assert losses[ends[step - 1] : ends[step]].sum().item() == pytest.approx(expected, rel=1e-4)
    assert not losses[: ends[1]].any()
    assert row.targets == sum(len(episode.observations[step]) + 1 for step in (2, 3))


def test_trunk_costs_what_the_plain_history_costs(model, tokenizer, builder, episode):
    row = builder.build(episode, RowPlan(0, "observed", 1, 3, (every(0, 1),), targets_from=1))
    batch = TreeBatch.collate([row], [0], pad_id=0)
    steps = tuple(Transition(a, o) for a, o in zip(ACTIONS[1:], OBSERVATIONS[1:], strict=True))
    text = template.render_context(Context("find a tree", OBSERVATIONS[0], steps))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert batch.tokens[0, : len(ids)].tolist() == ids
    assert set(batch.branch[0, len(ids) : batch.trunk].tolist()) <= {-1}
    with torch.no_grad():
        logits = model(torch.tensor([ids]), depth=2).logits[0]
    trunk = target_losses(model, batch, depth=2)[0, : len(ids)]
    targets = batch.label[0, : len(ids)] != IGNORED
    expected = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    torch.testing.assert_close(trunk[targets], expected[targets[:-1]], atol=1e-4, rtol=1e-4)
    assert int(targets.sum()) == sum(len(o) + 1 for o in episode.observations[1:])


def test_unsupervised_trunk_has_no_targets(builder, episode):
    row = builder.build(episode, RowPlan(0, "observed", 1, 3, (every(1, 2),), targets_from=None))
    horizons = {h for h, label in zip(row.horizon, row.label, strict=True) if label != IGNORED}
    assert horizons == {1, 2}


def test_a_branch_decodes_its_horizons_alone_and_holds_the_spine_of_all(builder, episode):
    plan = RowPlan(0, "observed", 1, 2, (Branch(0, (3,)), Branch(1, (1,))), targets_from=None)
    row = builder.build(episode, plan)
    whole = builder.build(episode, replace(plan, branches=(every(0, 3), every(1, 1))))
    assert {(b, d) for b, d in zip(row.branch, row.decode, strict=True) if d > 0} == {(1, 3), (2, 1)}
    assert {(b, d) for b, d in zip(whole.branch, whole.decode, strict=True) if d > 0} == {
        (1, 1), (1, 2), (1, 3), (2, 1),
    }  # fmt: skip
    spines = [[t for t, d in zip(r.tokens, r.decode, strict=True) if d <= 0] for r in (row, whole)]
    assert spines[0] == spines[1]
    assert [s.supervised for s in row.steps] == [False, False, False, True, False, True]
    assert [s.supervised for s in whole.steps] == [False, True, True, True, False, True]


def test_a_cut_plan_shortens_every_deeper_branch_and_nothing_else(builder, episode):
    plan = RowPlan(0, "observed", 1, 2, (every(0, 3), every(1, 1)), targets_from=1)
    assert plan.cut(3) is plan
    assert Branch(0, (3, 5)).cut(4) == Branch(0, (3, 4))
    assert Branch(0, (3, 5)).cut(2) == Branch(0, (2,))
    assert plan.cut(2) == RowPlan(0, "observed", 1, 2, (every(0, 2), every(1, 1)), targets_from=1)


def test_branch_steps_name_the_slots_the_rewards_and_the_ends(builder, episode, tokenizer):
    rows = [builder.build(episode, RowPlan(0, "observed", 1, i, (every(i, 3 - i), every(0, 2)), 1)) for i in (1, 2)]
    state = tokenizer.convert_tokens_to_ids("<|state|>")
    for layout in (trunk_and_branches, by_stage):
        batch = TreeBatch.collate(rows, [0, 1], 0, layout)
        steps = batch.steps
        assert (batch.tokens[steps.row[:, None], steps.columns] == state).all()
        assert (batch.stage[steps.row[:, None], steps.columns][:, 0] == steps.horizon).all()
        assert steps.horizon.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 2]
        assert steps.branch.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
        assert steps.branches == 4
        assert steps.reward.nan_to_num(-1).tolist() == [-1, 20, 30, -1, 10, 20, -1, 30, -1, 10, 20]
        assert steps.done.tolist() == [False, False, True] + [False] * 4 + [True] + [False] * 3
        texts = [tokenizer.decode(o[:n]) for o, n in zip(steps.observation, steps.observation_length, strict=True)]
        assert texts[1] == f"<|obs|>{OBSERVATIONS[2]}<|end|>"


@pytest.mark.parametrize(
    "overrides", [{}, {"state_slots": 2}, {"slots_in_trunk": False}, {"decode_sees": "state"}], ids=str
)
def test_branches_attended_one_by_one_are_the_dense_mask(tokenizer, episode, overrides):
    """Losses, latents and gradients, of rows of unequal lengths and depths, one of them without a branch."""
    model = random_model(prediction_heads=True, **overrides)
    builder = row_builder(tokenizer, model.config.slots)
    plans = [
        RowPlan(0, "full", 1, 3, (every(0, 3), Branch(2, (1,)), Branch(0, (2, 3))), 1),
        RowPlan(0, "observed", 1, 3, (), 1),
        RowPlan(1, "snapshot", 2, 2, (every(1, 2),), None),
    ]
    batch = TreeBatch.collate([builder.build(episode, plan) for plan in plans], range(3), 0)
    dense = row_mask(model.config, batch)
    plan = DepthPlan(loops=(4, 1, 2), mu_bwd=2, noise_seeds=(5, 6, 7), places=batch.place)
    results = []
    for mask in (dense, branch_mask(batch, dense)):
        model.zero_grad()
        out = model.model(batch.tokens, mask, batch.positions, use_cache=False, depth=plan)
        wanted = batch.label != IGNORED
        logits = model.lm_head(out.last_hidden_state[wanted])
        reward, ends, accepted = model.model.heads(batch.steps.at_slots(out.latent))
        loss = torch.nn.functional.cross_entropy(logits, batch.label[wanted]) + reward.square().mean()
        loss = loss + ends.mean() + accepted.mean()
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        results.append((logits.detach(), loss.detach(), gradients))
    (logits, loss, gradients), (other_logits, other_loss, other_gradients) = results
    torch.testing.assert_close(logits, other_logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(loss, other_loss, atol=1e-5, rtol=1e-5)
    assert gradients.keys() == other_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, other_gradients[name], atol=1e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


ALL_TERMS = ObjectiveConfig(reward_coef=1, continue_coef=1, accept_coef=1, consistency_coef=10, contraction_coef=10)
HEADS = {"prediction_heads": True, "monitor_head": True}


@pytest.mark.parametrize(
    ("overrides", "layout"),
    [
        (HEADS, trunk_and_branches),
        ({**HEADS, "propagate": "latent", "decode_sees": "state"}, by_stage),
    ],
    ids=["one pass", "stages"],
)
def test_gradients_of_two_processes_shares_add_up_to_those_of_the_whole_batch(builder, episode, overrides, layout):
    """Depth and noise follow the global row, so a row computes the same wherever it lands. With every term on."""
    plans = [RowPlan(0, ("full", "snapshot")[i % 2], 1, i, (every(0, 3 - i),), 1) for i in (1, 2, 1, 0)]
    rows = [builder.build(episode, plan) for plan in plans]
    objective = TextObjective(random_model(**overrides), ALL_TERMS).train()
    objective.remember_first_step(1e-3)
    whole = TreeBatch.collate(rows, range(4), 0, layout)

    def gradients(batches: list[TreeBatch]) -> dict[str, torch.Tensor]:
        objective.zero_grad()
        for batch in batches:
            plan = DepthPlan.sample(0, 5, batch.row_ids, 3.0, 6, batch.place)
            objective(batch, plan, whole.targets)[0].backward()
        return {n: p.grad.clone() for n, p in objective.named_parameters() if p.grad is not None}

    together = gradients([whole])
    shares = gradients([TreeBatch.collate(rows[:2], [0, 1], 0, layout), TreeBatch.collate(rows[2:], [2, 3], 0, layout)])
    assert together.keys() == shares.keys()
    assert len(together) == len(list(objective.parameters()))
    for name, gradient in together.items():
        assert gradient.any(), name
        torch.testing.assert_close(gradient, shares[name], atol=1e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("context_kind", "missing"), [("snapshot", "look"), ("full", "hidden"), ("briefed", "hidden")]
)  # fmt: skip
def test_a_row_that_shows_what_is_not_recorded_is_refused(builder, episode, context_kind, missing):
    bare = episode_of_texts(episode.goal, episode.observations, episode.actions, [None] * 4, [None] * 4)
    with pytest.raises(ValueError, match=f"must have {missing}"):
        builder.build(bare, RowPlan(0, context_kind, 1, 0, (every(0, 1),), 1))


def with_queries(episode, tokenizer):
    """Return the episode with one state query a step, `inventory`, answered "held STEP"."""

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return episode_of_texts(
        episode.goal,
        list(episode.observations),
        list(episode.actions),
        texts_of(episode, LOOK),
        texts_of(episode, INVENTORY),
        rewards=episode.rewards.tolist(),
        queries=[[(ids("inventory"), ids(f"held {step}"))] for step in range(4)],
    )


def test_query_branch_decodes_state_after_deferred_actions(builder, episode, tokenizer):
    plan = RowPlan(0, "observed", 1, 2, (Branch(1, (3,), query=0),), targets_from=None)
    row = builder.build(with_queries(episode, tokenizer), plan)
    branch = [i for i, number in enumerate(row.branch) if number == 1]
    text = tokenizer.decode([row.tokens[i] for i in branch])
    deferred = "".join(f"<|act|>{action}<|state|>" for action in ACTIONS[2:4])
    assert text == f"<|state|>{deferred}<|act|>inventory<|state|><|obs|>held 3<|end|>"
    labels = [row.label[i] for i in branch if row.label[i] != IGNORED]
    assert tokenizer.decode(labels) == "held 3<|end|>"
    assert {row.horizon[i] for i in branch if row.label[i] != IGNORED} == {QUERY_HORIZON}
    assert [s.supervised for s in row.steps] == [False, False, False, True]
    assert [s.reward for s in row.steps[1:3]] == [20, 30]
    assert [s.accepted for s in row.steps] == [True] * 4
    assert np.isnan(row.steps[3].reward)


def test_plan_cut_drops_deeper_queries():
    plan = RowPlan(0, "observed", 1, 2, (every(0, 3), Branch(1, (3,), query=0), Branch(1, (1,), query=0)), 1)
    assert plan.cut(2).branches == (every(0, 2), Branch(1, (1,), query=0))
