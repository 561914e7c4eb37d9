from __future__ import annotations

import numpy as np
import pytest
import torch

from loopwm.core import DepthPlan
from loopwm.text import format as template
from loopwm.text.format import Context, Transition
from loopwm.text.objective import TextObjective
from loopwm.text.tree import IGNORED, RowBuilder, RowPlan, TemplateIds, TokenEpisode, TreeBatch

OBSERVATIONS = ["You are in a room.", "The door is now open.", "You move to the hall.", "A 10 degrees cold hall."]
ACTIONS = ["", "open door", "go to hall", "look around"]


@pytest.fixture(scope="module")
def episode(tokenizer) -> TokenEpisode:
    def ids(text: str):
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.uint16)

    looks = [ids(f"look {i}") for i in range(4)]
    return TokenEpisode(ids("find a tree"), list(map(ids, OBSERVATIONS)), list(map(ids, ACTIONS)), looks, looks)


@pytest.fixture(scope="module")
def builder(tokenizer) -> RowBuilder:
    names = ("goal", "hidden", "look", "inv", "obs", "act", "state", "end")
    return RowBuilder(TemplateIds(**{n: tokenizer.convert_tokens_to_ids(f"<|{n}|>") for n in names}), 1)


def target_losses(model, batch: TreeBatch, depth: int) -> torch.Tensor:
    """Cross-entropy at every target of a batch, (B, L), zero elsewhere."""
    with torch.no_grad():
        out = model.model(batch.tokens, batch.attention_mask(), batch.positions, use_cache=False, depth=depth)
        logits = model.lm_head(out.last_hidden_state).transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, batch.label, ignore_index=IGNORED, reduction="none")


def prompt_loss(model, tokenizer, context: Context, actions: list[str], observation: str, depth: int) -> float:
    """Summed loss of an observation after a plain prompt, as it is served: no tree, no mask."""
    prompt = tokenizer(template.render_prompt(context, actions), add_special_tokens=False)["input_ids"]
    answer = tokenizer(observation + template.END, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer]), depth=depth).logits[0, len(prompt) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()


@pytest.mark.parametrize("snapshot", [False, True])
def test_each_horizon_of_a_branch_costs_what_the_same_actions_cost_alone(model, tokenizer, builder, episode, snapshot):
    """Branches at several steps and their side branches do not see each other, and see the trunk up to their step."""
    plan = RowPlan(0, snapshot, 1, 3, ((0, 3), (1, 2), (2, 1)), supervise_trunk=True)
    row = builder.build(episode, plan)
    padded = builder.build(episode, RowPlan(1, False, 2, 1, ((1, 2),), supervise_trunk=False))
    batch = TreeBatch.collate([row, padded], [0, 1], pad_id=0)
    losses = target_losses(model, batch, depth=3)
    look = ("look 0", "look 0") if snapshot else (None, None)
    for number, (start, horizons) in enumerate(plan.branches, start=1):
        steps = tuple(Transition(ACTIONS[i], OBSERVATIONS[i]) for i in range(1, start + 1))
        context = Context("find a tree", OBSERVATIONS[0], steps, *look)
        for k in range(1, horizons + 1):
            here = (batch.branch[0] == number) & (batch.horizon[0] == k) & (batch.label[0] != IGNORED)
            expected = prompt_loss(
                model, tokenizer, context, ACTIONS[start + 1 : start + k + 1], OBSERVATIONS[start + k], 3
            )
            assert losses[0][here].sum().item() == pytest.approx(expected, rel=1e-4)


def test_trunk_costs_what_the_plain_history_costs(model, tokenizer, builder, episode):
    row = builder.build(episode, RowPlan(0, False, 1, 3, ((0, 1),), supervise_trunk=True))
    batch = TreeBatch.collate([row], [0], pad_id=0)
    steps = tuple(Transition(a, o) for a, o in zip(ACTIONS[1:], OBSERVATIONS[1:], strict=True))
    text = template.render_context(Context("find a tree", OBSERVATIONS[0], steps), state_slots=0)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert batch.tokens[0, : batch.trunk].tolist() == ids
    with torch.no_grad():
        logits = model(torch.tensor([ids]), depth=2).logits[0]
    trunk = target_losses(model, batch, depth=2)[0, : batch.trunk]
    targets = batch.label[0, : batch.trunk] != IGNORED
    expected = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    torch.testing.assert_close(trunk[targets], expected[targets[:-1]], atol=1e-4, rtol=1e-4)
    assert int(targets.sum()) == sum(len(o) + 1 for o in episode.observations[1:])


def test_unsupervised_trunk_has_no_targets(builder, episode):
    row = builder.build(episode, RowPlan(0, False, 1, 3, ((1, 2),), supervise_trunk=False))
    horizons = {h for h, label in zip(row.horizon, row.label, strict=True) if label != IGNORED}
    assert horizons == {1, 2}


def test_gradients_of_two_processes_shares_add_up_to_those_of_the_whole_batch(model, builder, episode):
    """Depth and noise follow the global row, so a row computes the same wherever it lands."""
    rows = [builder.build(episode, RowPlan(0, i % 2 == 1, 1, i, ((0, 3 - i),), True)) for i in (1, 2, 1, 0)]
    objective = TextObjective(model).train()
    whole = TreeBatch.collate(rows, range(4), pad_id=0)

    def gradients(batches: list[TreeBatch]) -> dict[str, torch.Tensor]:
        objective.zero_grad()
        for batch in batches:
            plan = DepthPlan.sample(0, 5, batch.row_ids, 3.0, 6, batch.place)
            objective(batch, plan, whole.targets)[0].backward()
        return {n: p.grad.clone() for n, p in objective.named_parameters() if p.grad is not None}

    together = gradients([whole])
    shares = gradients([TreeBatch.collate(rows[:2], [0, 1], 0), TreeBatch.collate(rows[2:], [2, 3], 0)])
    objective.zero_grad()
    objective.eval()
    assert together.keys() == shares.keys()
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, shares[name], atol=1e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_a_snapshot_of_a_step_without_look_is_refused(builder, episode):
    bare = TokenEpisode(episode.goal, episode.observations, episode.actions, [None] * 4, [None] * 4)
    with pytest.raises(ValueError, match="no look"):
        builder.build(bare, RowPlan(0, True, 1, 0, ((0, 1),), True))
