"""The terms beside the observation loss, against loops that follow the equations."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from loopwm.core.depth import DepthPlan
from loopwm.records.token_episode import TokenEpisode
from loopwm.text.data.collate import TreeBatch
from loopwm.text.data.tree import Branch, RowBuilder, RowPlan, TargetWeights
from loopwm.text.model.heads import MOST_POINTS, PredictionHeads
from loopwm.text.training.config import ObjectiveConfig
from loopwm.text.training.loss import (
    MEDIAN_STEPS,
    Outcomes,
    TextObjective,
    acceptance_loss,
    bag_of_words_loss,
    consistency_loss,
    continuation_loss,
    contraction_loss,
    reward_loss,
)
from tests.fixtures.models import random_model
from tests.fixtures.rows import every

BRANCHES = (every(0, 3), every(2, 1), every(1, 2))


def batch_of(builder, episode, terminal_only: bool = False) -> TreeBatch:
    branches = tuple(Branch(b.step, (b.deepest,)) if terminal_only else b for b in BRANCHES)
    plan = RowPlan(0, "observed", 1, 2, branches, 1)
    return TreeBatch.collate([builder.build(episode, plan)], [0], 0)


def latents(batch: TreeBatch, slots: int = 2, dim: int = 5) -> torch.Tensor:
    return torch.randn(len(batch.steps.row), slots, dim, generator=torch.Generator().manual_seed(1))


def path_lengths(h: torch.Tensor) -> list[tuple[int, float]]:
    """(K, sum_k rms(h_{k+1} - h_k)) of each branch."""
    out, i = [], 0
    for deepest in (b.deepest for b in BRANCHES):
        moves = [(h[i + k + 1] - h[i + k]).square().mean().sqrt().item() for k in range(deepest)]
        out.append((deepest, sum(moves)))
        i += deepest + 1
    return out


def test_contraction_is_zero_below_the_budget_and_grows_linearly_above(builder, episode):
    batch = batch_of(builder, episode)
    h = latents(batch)
    paths = path_lengths(h)
    enough = max(total / k for k, total in paths)
    for c_max in (2 * enough, enough * 1.001):
        assert contraction_loss(h, batch.steps, torch.tensor(c_max))[0].item() == 0
    for c_max in (0.9 * enough, 0.5 * enough, 0.1 * enough):
        expected = sum(max(0.0, total - k * c_max) for k, total in paths)
        assert contraction_loss(h, batch.steps, torch.tensor(c_max))[0].item() == pytest.approx(expected, rel=1e-5)
    scaled = [contraction_loss(a * h, batch.steps, torch.tensor(0.0))[0].item() for a in (1.0, 2.0, 4.0)]
    assert scaled == pytest.approx([scaled[0], 2 * scaled[0], 4 * scaled[0]], rel=1e-5)


def test_contraction_of_latents_that_stand_still_has_a_finite_gradient(builder, episode):
    batch = batch_of(builder, episode)
    h = torch.zeros_like(latents(batch), requires_grad=True)
    contraction_loss(h, batch.steps, torch.tensor(torch.inf))[0].backward()
    assert torch.equal(h.grad, torch.zeros_like(h))


def test_c_max_is_twice_the_running_median_and_infinite_before_the_first_step(model):
    objective = TextObjective(model)
    assert objective.c_max().item() == math.inf
    for value in (1.0, 5.0, 2.0):
        objective.remember_first_step(value)
    assert objective.c_max().item() == 4.0
    for _ in range(MEDIAN_STEPS):
        objective.remember_first_step(0.25)
    assert objective.c_max().item() == 0.5
    assert "first_steps" in objective.state_dict()


def test_consistency_follows_its_equation_over_the_steps_between(builder, episode):
    """1/(K-1) sum_{k=1}^{K-1}: neither h_0 nor h_K, and nothing of a branch of one step."""
    steps = batch_of(builder, episode).steps
    generator = torch.Generator().manual_seed(2)
    summary, reference = (torch.randn(len(steps.row), 6, generator=generator, requires_grad=True) for _ in range(2))
    at = steps.between
    loss, numbers = consistency_loss(summary[at], reference[at], steps.deepest[at])
    expected, i = 0.0, 0
    for deepest in (b.deepest for b in BRANCHES):
        for k in range(1, deepest):
            expected += (summary[i + k] - reference[i + k]).square().sum().item() / (deepest - 1)
        i += deepest + 1
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert numbers["consistency_loss"][1].item() == 2
    loss.backward()
    assert summary.grad.any()
    assert reference.grad is None


def test_consistency_sends_no_gradient_into_the_encoder(builder, episode):
    """The encoder is followed, not taught: with h_k held fixed, only g_omega and h_k get a gradient."""
    model = random_model(monitor_head=True)
    batch = batch_of(builder, episode)
    h = latents(batch, 1, model.config.hidden_size).requires_grad_()
    reference = model.model.embed_observations(batch.steps.observation, batch.steps.observation_length)
    at = batch.steps.between
    consistency_loss(model.model.monitor(h)[at], reference[at], batch.steps.deepest[at])[0].backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    assert reached == {"model.monitor.weight", "model.monitor.bias"}
    assert h.grad.any()
    torch.testing.assert_close(reference.norm(dim=-1), (batch.steps.horizon > 0).float())


def test_a_bag_is_the_distinct_words_of_every_step_in_parts_as_they_weigh(builder, episode, tokenizer):
    """-sum_w p(w) log q(w) over each step's distinct tokens without marks, those that nobody decodes too."""
    heavy = next(iter(episode.observations[2]))
    builder = RowBuilder(builder.ids, builder.slots, {episode.env: TargetWeights({int(heavy): 5.0}, opening=2.0)})
    steps = batch_of(builder, episode, terminal_only=True).steps
    logits = torch.randn(len(steps.row), len(tokenizer), generator=torch.Generator().manual_seed(4))
    loss, numbers = bag_of_words_loss(logits, steps.observation, steps.observation_weight)
    expected, count = 0.0, 0
    for scores, branch, horizon in zip(logits, steps.branch.tolist(), steps.horizon.tolist(), strict=True):
        if horizon:
            words = [int(w) for w in episode.observations[BRANCHES[branch].step + horizon]]
            weights = {w: 5.0 if w == heavy else 1.0 for w in words}
            weights[words[0]] = max(weights[w] * (2.0 if i == 0 else 1.0) for i, w in enumerate(words) if w == words[0])
            nats = -scores.log_softmax(0)
            expected += sum(w * nats[word].item() for word, w in weights.items()) / sum(weights.values())
            count += 1
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert numbers["bag_loss"].tolist() == [pytest.approx(expected, rel=1e-5), count]
    assert count > len(BRANCHES)


def test_a_bag_is_read_before_the_coda_where_later_columns_see_it(builder, episode):
    batch = batch_of(builder, episode)

    def gradients(coefficient: float) -> dict[str, torch.Tensor]:
        objective = TextObjective(random_model(), ObjectiveConfig(bag_coef=coefficient)).train()
        plan = DepthPlan.sample(0, 0, batch.row_ids, 2.0, 6, batch.place, "fixed")
        objective(batch, plan, 1.0)[0].backward()
        return {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}

    without, taught = gradients(0.0), gradients(10.0)
    after = ("model.model.core.coda.", "model.model.core.C.", "model.model.norm.", "model.model.copy.")
    for name, gradient in without.items():
        assert torch.allclose(gradient, taught[name], atol=1e-5, rtol=1e-4) == name.startswith(after), name


def test_an_observation_is_embedded_by_itself_whatever_it_is_padded_with(builder, episode):
    model = random_model()
    steps = batch_of(builder, episode).steps
    together = model.model.embed_observations(steps.observation, steps.observation_length)
    for i in (1, 2, 5):
        alone = steps.observation[i : i + 1, : steps.observation_length[i]]
        with torch.no_grad():
            x = model.model.embed_norm(model.model.embed_tokens(alone))
            e = model.model.core.input_norm(_prelude(model, x))
        torch.testing.assert_close(together[i], F.normalize(e[0].mean(0), dim=-1), atol=1e-5, rtol=1e-4)


def _prelude(model, x: torch.Tensor) -> torch.Tensor:
    """The prelude as the model runs a plain prompt: what enters the loop's input norm."""
    seen = []
    hook = model.model.core.input_norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.model(inputs_embeds=_before_norm(model, x), depth=1)
    hook.remove()
    return seen[0]


def _before_norm(model, x: torch.Tensor) -> torch.Tensor:
    """Embeddings whose norm is `x`: RMSNorm gives x back for x / weight, which has a mean square of one."""
    return x / model.model.embed_norm.weight


def some_refused(episode: TokenEpisode) -> TokenEpisode:
    """Return the episode with every second action refused."""
    steps = episode.steps.copy()
    steps["accepted"] = np.arange(len(steps)) % 2 == 0
    return replace(episode, steps=steps)


@pytest.mark.parametrize("terminal_only", [False, True])
def test_outcomes_are_charged_at_supervised_steps_only(builder, episode, terminal_only):
    batch = batch_of(builder, some_refused(episode), terminal_only)
    generator = torch.Generator().manual_seed(3)
    reward = torch.randn(len(batch.steps.row), 2 * MOST_POINTS + 1, generator=generator)
    ends = torch.randn(len(batch.steps.row), generator=generator)
    accepted = torch.randn(len(batch.steps.row), generator=generator)
    expected_reward = expected_end = expected_accepted = 0.0
    i, count = 0, 0
    for start, deepest in ((b.step, b.deepest) for b in BRANCHES):
        for k in range(1, deepest + 1):
            if terminal_only and k < deepest:
                continue
            below, above = math.floor(episode.rewards[start + k]), math.ceil(episode.rewards[start + k])
            logs = reward[i + k].log_softmax(-1)[[below + MOST_POINTS, above + MOST_POINTS]]
            share = episode.rewards[start + k] - below
            expected_reward -= ((1 - share) * logs[0] + share * logs[1]).item()
            chance = ends[i + k].sigmoid()
            expected_end -= (1 - chance if episode.dones[start + k] else chance).log().item()
            chance = accepted[i + k].sigmoid()
            expected_accepted -= (1 - chance if (start + k) % 2 else chance).log().item()
            count += 1
        i += deepest + 1
    outcomes = Outcomes.of([batch.steps])
    loss, numbers = reward_loss(reward, outcomes)
    assert loss.item() == pytest.approx(expected_reward, rel=1e-5)
    assert numbers["reward_loss"][1].item() == count
    assert continuation_loss(ends, outcomes)[0].item() == pytest.approx(expected_end, rel=1e-5)
    assert acceptance_loss(accepted, outcomes)[0].item() == pytest.approx(expected_accepted, rel=1e-5)


@pytest.mark.parametrize("reward_attention", [False, True])
def test_every_term_enters_the_loss_with_its_coefficient_over_the_targets(builder, episode, reward_attention):
    model = random_model(prediction_heads=True, monitor_head=True, reward_attention=reward_attention)
    batch = batch_of(builder, episode)

    def loss(**coefficients: float) -> float:
        objective = TextObjective(model, ObjectiveConfig(**coefficients))
        objective.remember_first_step(1e-3)
        with torch.no_grad():
            return objective(batch, 2, batch.targets)[0].item()

    objective = TextObjective(model)
    objective.remember_first_step(1e-3)
    with torch.no_grad():
        _, numbers = objective(batch, 2, batch.targets)
    terms = {
        "reward_coef": "reward_loss",
        "continue_coef": "continue_loss",
        "accept_coef": "accept_loss",
        "consistency_coef": "consistency_loss",
        "contraction_coef": "contraction_loss",
    }
    plain = loss()
    for coefficient, name in terms.items():
        summed = numbers[name][0].item()
        assert summed > 0
        assert loss(**{coefficient: 2.0}) - plain == pytest.approx(2 * summed / batch.targets, rel=1e-3)


def test_only_acceptance_is_charged_where_nobody_recorded_rewards(builder, episode):
    steps = episode.steps.copy()
    steps["reward"] = math.nan
    batch = batch_of(builder, replace(episode, steps=steps))
    outcomes = Outcomes.of([batch.steps, batch.trunk_steps])
    steps = len(batch.steps.row) + len(batch.trunk_steps.row)
    assert reward_loss(torch.zeros(steps, 2 * MOST_POINTS + 1), outcomes)[0].item() == 0
    assert continuation_loss(torch.zeros(steps), outcomes)[0].item() == 0
    charged = int(outcomes.supervised.sum())
    assert acceptance_loss(torch.zeros(steps), outcomes)[0].item() == pytest.approx(charged * math.log(2))


@pytest.mark.parametrize("reward_attention", [False, True])
def test_outcomes_can_be_learned_from_the_latents(builder, episode, reward_attention):
    """The heads alone, on fixed latents of a random model, reach the rewards they were given."""
    model = random_model(prediction_heads=True, reward_attention=reward_attention)
    batch = batch_of(builder, some_refused(episode))
    with torch.no_grad():
        out = model.model(batch.tokens, batch.attention_mask(), batch.positions, use_cache=False, depth=2)
    h, outcomes = batch.steps.at_slots(out.latent), Outcomes.of([batch.steps])
    model.model.heads.reset_parameters()
    optimizer = torch.optim.Adam(model.model.heads.parameters(), lr=0.02)
    for _ in range(600):
        optimizer.zero_grad()
        reward, ends, accepted = model.model.heads(h)
        terms = reward_loss(reward, outcomes), continuation_loss(ends, outcomes), acceptance_loss(accepted, outcomes)
        sum(loss for loss, _ in terms).backward()
        optimizer.step()
    with torch.no_grad():
        predicted = model.model.heads.predict(h)
    charged = batch.steps.supervised
    torch.testing.assert_close(predicted.reward[charged], batch.steps.reward[charged], atol=0.5, rtol=0)
    assert ((predicted.continuation[charged] < 0.5) == batch.steps.done[charged]).all()
    assert ((predicted.acceptance[charged] > 0.5) == batch.steps.accepted[charged]).all()
    assert not batch.steps.accepted[charged].all()


def test_the_predicted_reward_is_the_likeliest_and_not_one_between():
    heads = PredictionHeads(4)
    assert heads.predict(torch.randn(1, 1, 4)).reward.item() == 0
    with torch.no_grad():
        heads.points.bias[MOST_POINTS + torch.tensor([0, 60, 66])] = torch.tensor([0.2, 0.5, 0.3]).log() + 30
        predicted = heads.predict(torch.randn(2, 1, 4))
    assert predicted.reward.tolist() == [60, 60]
    torch.testing.assert_close(predicted.expected_reward, torch.full((2,), 0.5 * 60 + 0.3 * 66))


def cut(rows, depths: list[int], groups: list[list[int]]) -> list[tuple[TreeBatch, DepthPlan]]:
    """A global batch of these rows in micro-batches, each row with its own depth and noise wherever it lands."""
    batches = [TreeBatch.collate([rows[i] for i in group], group, 0) for group in groups]
    plans = [
        DepthPlan(tuple(depths[i] for i in group), 2, tuple(group), batch.place)
        for group, batch in zip(groups, batches, strict=True)
    ]
    return list(zip(batches, plans, strict=True))


def test_loss_gradient_and_what_is_logged_do_not_depend_on_how_the_global_batch_is_cut(builder, episode):
    plans = [
        RowPlan(0, "observed", 1, 2, (every(0, 3), every(2, 1)), 1),
        RowPlan(1, "snapshot", 2, 2, (every(1, 2),), None),  # few targets among many tokens
        RowPlan(0, "observed", 1, 3, (), 1),
    ]
    rows, depths = [builder.build(episode, plan) for plan in plans], [4, 1, 3]
    targets = sum(row.targets for row in rows)
    found = []
    for groups in ([[0, 1, 2]], [[0], [1, 2]], [[2], [0], [1]]):
        model = random_model(prediction_heads=True, monitor_head=True)
        objective = TextObjective(
            model,
            ObjectiveConfig(reward_coef=1, continue_coef=1, accept_coef=1, consistency_coef=1, contraction_coef=1),
        )
        objective.remember_first_step(1e-3)
        total, logged = 0.0, {}
        for batch, plan in cut(rows, depths, groups):
            loss, numbers = objective(batch, plan, targets)
            loss.backward()
            total += loss.item()
            logged = {name: value + logged.get(name, 0) for name, value in numbers.items()}
        for of_a_batch in ("state_rms", "last_step_rms"):
            del logged[of_a_batch]
        found.append((total, logged, {name: p.grad for name, p in model.named_parameters()}))
    whole, *others = found
    for total, logged, gradients in others:
        assert total == pytest.approx(whole[0], rel=1e-5)
        for name, value in logged.items():
            torch.testing.assert_close(value, whole[1][name], rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, whole[2][name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
