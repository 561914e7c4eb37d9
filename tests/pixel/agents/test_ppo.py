"""Policy, advantages and updates, against slow references."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from loopwm.pixel.agents import ppo
from loopwm.pixel.agents.ppo import PPO, PPOConfig, TargetScale, Trajectories, advantages, ppo_loss
from loopwm.pixel.agents.ppo_policy import ActorCritic, PolicyConfig, sample_action
from loopwm.records.errors import InputError

B, T, SHAPE, ACTIONS = 4, 6, (10, 12, 3), 5
CONFIG = PolicyConfig(channels=(4, 8), memory=16, hidden=32)
PAPER = PPOConfig()


@pytest.fixture(params=[CONFIG, replace(CONFIG, norm="layer", activation="silu", shared_heads=True)], ids=str)
def policy(request):
    torch.manual_seed(0)
    return ActorCritic(request.param, SHAPE, ACTIONS)


def made(policy, seed=0):
    """What a policy did on random frames, with log-probabilities and values that are its own."""
    g = torch.Generator().manual_seed(seed)
    obs = torch.randint(0, 256, (B, T, *SHAPE), dtype=torch.uint8, generator=g)
    first = torch.rand(B, T, generator=g) < 0.3
    memory, fresh = torch.randn(B, 16, generator=g), torch.randn(B, T, 16, generator=g)
    with torch.no_grad():
        out = policy(obs, first, memory, fresh)
    action = torch.randint(0, ACTIONS, (B, T), generator=g)
    log_p = out.logits.log_softmax(-1).gather(-1, action[..., None])[..., 0]
    reward = torch.randn(B, T, generator=g)
    ends = torch.rand(B, T, generator=g)
    next_value = torch.randn(B, T, generator=g)
    return Trajectories(
        obs, first, action, log_p, out.value, next_value, reward, ends < 0.15, ends > 0.85, memory, fresh
    )


@torch.no_grad()
def test_a_whole_sequence_equals_its_frames_one_by_one(policy):
    data = made(policy)
    whole, memory = policy(data.obs, data.first, data.memory, data.fresh), data.memory
    for t in range(T):
        began = data.first[:, t, None]
        out = policy.step(data.obs[:, t], torch.where(began, data.fresh[:, t], memory))
        memory = out.memory
        assert torch.allclose(out.logits, whole.logits[:, t], atol=1e-5)
        assert torch.allclose(out.value, whole.value[:, t], atol=1e-5)
    assert torch.allclose(memory, whole.memory, atol=1e-5)


def test_frames_of_the_paper_become_8192_numbers():
    policy = ActorCritic(PolicyConfig(hidden=8), (63, 63, 3), 17)
    assert policy.encoder(torch.zeros(1, 3, 63, 63)).flatten(1).shape == (1, 8192)


def test_advantages_equal_their_definition_step_by_step():
    """Sums over what follows: (gamma lambda)^n delta_{t+n} up to where the episode ends."""
    policy = ActorCritic(CONFIG, SHAPE, ACTIONS)
    data, scale = made(policy), TargetScale(0.95)
    scale.load_state_dict({"mean": 1.5, "deviation": 2.0, "weight": 0.5})
    found, target = advantages(data, scale, PAPER)
    value, after = data.value * 4.0 + 3.0, data.next_value * 4.0 + 3.0
    for b in range(B):
        for t in range(T):
            total, factor = 0.0, 1.0
            for n in range(t, T):
                bootstrap = 0.0 if data.terminated[b, n] else PAPER.gamma * after[b, n].item()
                total += factor * (data.reward[b, n].item() + bootstrap - value[b, n].item())
                factor *= PAPER.gamma * PAPER.td_lambda
                if data.terminated[b, n] or data.truncated[b, n]:
                    break
            assert found[b, t].item() == pytest.approx(total, abs=1e-4)
    assert torch.allclose(target, found + value)


def test_the_scale_of_targets_forgets_what_was_before_the_first_and_restores_what_it_standardised():
    scale, targets = TargetScale(0.9), torch.randn(50) * 3 + 7
    assert torch.equal(scale.standardise(targets), targets)
    scale.update(targets)
    standard = scale.standardise(targets)
    assert standard.mean().item() == pytest.approx(0, abs=1e-5)
    assert standard.std(correction=0).item() == pytest.approx(1, abs=1e-4)
    scale.update(targets + 100)
    assert torch.allclose(scale.restore(scale.standardise(targets)), targets, atol=1e-4)
    assert scale.restore(torch.zeros(1)).item() == pytest.approx((0.9 * 7 + 107) / 1.9, abs=1.0)


def test_the_loss_equals_the_papers_sum_over_steps():
    torch.manual_seed(0)
    policy = ActorCritic(CONFIG, SHAPE, ACTIONS)
    data = made(policy)
    data = replace(data, log_p=data.log_p + 0.4 * torch.randn(B, T))
    advantage, target = torch.randn(B, T), torch.randn(B, T)
    loss, numbers = ppo_loss(policy, data, advantage, target, PAPER)
    out, total = policy(data.obs, data.first, data.memory, data.fresh), 0.0
    for b, t in np.ndindex(B, T):
        p = out.logits[b, t].softmax(-1)
        ratio = p[data.action[b, t]] / data.log_p[b, t].exp()
        clip = min(max(ratio, 0.8), 1.2)
        total += -min(ratio * advantage[b, t], clip * advantage[b, t])
        total += 2.0 * (out.value[b, t] - target[b, t]) ** 2 + 0.01 * (p * p.log()).sum()
    assert loss.item() == pytest.approx((total / (B * T)).item(), abs=1e-4)
    assert 0 < numbers["clipped_share"] < 1


def test_a_first_update_starts_from_ratio_one_and_teaches_good_actions(policy):
    data = made(policy)
    data = replace(data, reward=(data.action == 2).float(), terminated=torch.ones(B, T, dtype=torch.bool))
    _, numbers = ppo_loss(policy, data, torch.zeros(B, T), torch.zeros(B, T), PAPER)
    assert numbers["clipped_share"] == 0
    before = policy(data.obs, data.first, data.memory, data.fresh).logits.softmax(-1)[..., 2].mean()
    learner = PPO(policy, replace(PAPER, learning_rate=1e-2))
    for _ in range(5):
        learner.update(data, 2, 2, torch.Generator().manual_seed(0))
    after = policy(data.obs, data.first, data.memory, data.fresh).logits.softmax(-1)[..., 2].mean()
    assert after > before + 0.1


def test_more_parts_than_environments_are_refused():
    policy = ActorCritic(CONFIG, SHAPE, ACTIONS)
    with pytest.raises(ValueError, match="minibatches: must be between 1 and 4 environments, got 5"):
        PPO(policy, PAPER).update(made(policy), 1, 5, torch.Generator())


def test_settings_that_would_do_nothing_or_fail_are_refused():
    with pytest.raises(ValueError, match=r"target_discount: must be below 1, got 1.0"):
        PPOConfig(target_discount=1.0)
    deep = PolicyConfig(channels=(4, 4, 4, 4), norm="instance")
    ActorCritic(deep, (17, 16, 3), ACTIONS)
    with pytest.raises(InputError, match=r"policy.channels: must leave more than one place of a frame"):
        ActorCritic(deep, (16, 16, 3), ACTIONS)


def test_actions_are_drawn_as_often_as_they_are_likely():
    logits = torch.tensor([0.7, 0.2, 0.1]).log().expand(20000, 3)
    action, log_p = sample_action(logits, torch.Generator().manual_seed(0))
    shares = torch.bincount(action, minlength=3) / len(action)
    assert torch.allclose(shares, torch.tensor([0.7, 0.2, 0.1]), atol=0.02)
    assert torch.allclose(log_p.exp(), torch.tensor([0.7, 0.2, 0.1])[action])


def test_a_policy_with_layer_norm_learns_from_frames_of_one_channel():
    """Which the interpreter does not survive if they stay permuted."""
    policy = ActorCritic(PolicyConfig(channels=(4,), memory=4, hidden=8, norm="layer"), (10, 5, 1), 3)
    obs = torch.zeros(2, 3, 10, 5, 1, dtype=torch.uint8)
    began = torch.zeros(2, 3, dtype=torch.bool)
    memory = policy.initial(2, torch.device("cpu"))
    policy(obs, began, memory, memory[:, None].expand(-1, 3, -1)).logits.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.encoder.parameters() if p.grad is not None)


def test_imagined_advantages_are_in_the_unit_of_real_ones(policy, monkeypatch):
    seen, deviations = [], []
    monkeypatch.setattr(ppo, "ppo_loss", lambda *given: seen.append(given[2]) or ppo_loss(*given))
    for deviation in (None, 5.0):
        learner = PPO(copy.deepcopy(policy), PAPER)
        numbers = learner.update(made(policy), 1, 1, torch.Generator().manual_seed(0), deviation)
        deviations.append(numbers["advantage_deviation"])
    assert seen[0].std(correction=0).item() == pytest.approx(1, rel=1e-4)
    assert seen[1].std(correction=0).item() == pytest.approx(deviations[1] / 5, rel=1e-4)
