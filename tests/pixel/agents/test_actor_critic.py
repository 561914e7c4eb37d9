"""The actor-critic: returns by hand, what counts in its loss, its scale, its slow critic, its memory."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from loopwm.core.twohot import two_hot_loss
from loopwm.pixel.agents.actor_critic import (
    ActorCriticConfig,
    ActorCriticLearner,
    ActorCriticNetwork,
    Experience,
    PercentileScale,
    lambda_returns,
    valid_mask,
)

TINY = ActorCriticConfig(hidden=16, entropy_coef=0.01, learning_rate=1e-2)


def learner(config: ActorCriticConfig = TINY, inputs: tuple[int, ...] = (5,), actions: int = 3) -> ActorCriticLearner:
    torch.manual_seed(0)
    made = ActorCriticLearner(ActorCriticNetwork(config, inputs, actions), config)
    for parameter in made.network.parameters():  # heads begin at zero, where much is equal
        parameter.data += 0.1 * torch.randn_like(parameter)
    return made


def experience(
    rows: int = 4, steps: int = 6, inputs: tuple[int, ...] = (5,), memory: int = 0, seed: int = 1
) -> Experience:
    torch.manual_seed(seed)
    terminated = torch.rand(rows, steps) < 0.2
    return Experience(
        before=torch.zeros(rows, 0, *inputs),
        before_first=torch.zeros(rows, 0, dtype=torch.bool),
        memory=torch.zeros(rows, 2 * memory),
        inputs=torch.randn(rows, steps + 1, *inputs),
        first=torch.zeros(rows, steps + 1, dtype=torch.bool),
        fresh=torch.zeros(rows, steps + 1, 2 * memory),
        action=torch.randint(3, (rows, steps)),
        reward=torch.randn(rows, steps),
        terminated=terminated,
        truncated=torch.zeros_like(terminated),
        final_value=torch.zeros(rows, steps),
        valid=valid_mask(terminated),
    )


def flags(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.bool)


def test_returns_of_five_steps_with_an_end_and_a_truncation_by_hand() -> None:
    """gamma 0.5, lambda 0.8; the second step is truncated, the fourth terminated."""
    reward, values = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]), torch.tensor([[10.0, 20.0, 30.0, 40.0, 50.0]])
    found = lambda_returns(reward, flags(0, 0, 0, 1, 0), flags(0, 1, 0, 0, 0), values, 0.5, 0.8)
    fifth = 5 + 0.5 * 50
    fourth = 4.0
    third = 3 + 0.5 * (0.2 * 30 + 0.8 * fourth)
    second = 2 + 0.5 * 20
    first = 1 + 0.5 * (0.2 * 10 + 0.8 * second)
    assert torch.allclose(found, torch.tensor([[first, second, third, fourth, fifth]]))


def test_returns_are_the_weighted_mean_of_all_n_step_returns() -> None:
    """The definition: (1 - lambda) sum lambda^(n-1) G^(n), the rest of the weight on the longest."""
    rng, gamma, lam, steps = np.random.default_rng(0), 0.9, 0.7, 7
    reward, values = rng.normal(size=steps), rng.normal(size=steps)
    found = lambda_returns(
        torch.tensor(reward)[None], flags(*[0] * steps), flags(*[0] * steps), torch.tensor(values)[None], gamma, lam
    )
    for t in range(steps):
        n_step = [
            sum(gamma**i * reward[t + i] for i in range(n)) + gamma**n * values[t + n - 1]
            for n in range(1, steps - t + 1)
        ]
        weights = [(1 - lam) * lam ** (n - 1) for n in range(1, steps - t)] + [lam ** (steps - t - 1)]
        assert found[0, t].item() == pytest.approx(float(np.dot(weights, n_step)))


def test_what_lies_behind_an_end_changes_nothing() -> None:
    made, data = learner(), experience()
    behind = ~data.valid
    assert behind.any()
    expected = copy.deepcopy(made).update(data)
    changed = replace(data, reward=torch.where(behind, 100.0, data.reward), inputs=data.inputs.clone())
    later = torch.nn.functional.pad(behind, (1, 0))  # an ended step's own next input is behind, too
    later[:, 1:] |= data.terminated
    changed.inputs[later] = 7.0
    assert made.update(changed) == pytest.approx(expected)


def test_an_episode_that_begins_is_learned_with_the_memory_it_begins_with() -> None:
    made, data = learner(replace(TINY, memory=4)), experience(memory=4)
    warmed = replace(data, fresh=torch.randn_like(data.fresh))
    assert made.loss(warmed)[0].item() == pytest.approx(made.loss(data)[0].item())
    begun = data.first.clone()
    begun[:, 3] = True
    losses = [made.loss(replace(x, first=begun))[0].item() for x in (data, warmed)]
    assert losses[0] != pytest.approx(losses[1])


def test_what_was_seen_before_is_read_again_and_its_gradient_reaches_what_is_remembered() -> None:
    """As if it had been played and were not valid."""
    made, data = learner(replace(TINY, memory=4, percentiles=())), experience(memory=4, steps=6)
    encoder = next(made.network.encoder.parameters(), next(made.network.memory.parameters()))
    later = replace(
        data,
        before=data.inputs[:, :2],
        before_first=data.first[:, :2],
        **{name: getattr(data, name)[:, 2:] for name in ("inputs", "first", "fresh", "action", "reward", "terminated")},
        **{name: getattr(data, name)[:, 2:] for name in ("truncated", "final_value", "valid")},
    )
    whole = replace(data, valid=data.valid & (torch.arange(6) >= 2))
    losses, gradients = [], []
    for each in (whole, later):
        made.network.zero_grad()
        loss, _ = made.loss(each)
        loss.backward()
        losses.append(loss.item())
        gradients.append(encoder.grad.clone())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert torch.allclose(*gradients, atol=1e-5)
    forgotten = replace(later, before=later.before[:, :0], before_first=later.before_first[:, :0])
    assert made.loss(forgotten)[0].item() != pytest.approx(losses[0], rel=1e-4)


def test_the_loss_is_the_papers_sum_over_valid_steps() -> None:
    made, data = learner(replace(TINY, scale_decay=0.0)), experience()
    for parameter in made.slow_critic.parameters():
        parameter.data += 0.3
    loss, _ = made.loss(data)
    network, c = made.network, made.config
    critic = network.critic(data.inputs)
    value = network.value(critic)
    returns = lambda_returns(data.reward, data.terminated, data.truncated, value[:, 1:], c.gamma, c.td_lambda)
    low, high = np.percentile(returns[data.valid].detach().numpy(), [5, 95])
    total, count = 0.0, 0
    for b in range(4):
        for t in range(6):
            if data.terminated[b, :t].any():
                continue
            policy = torch.distributions.Categorical(logits=network.actor(data.inputs[b, t]))
            advantage = (returns[b, t] - value[b, t]) / max(1.0, high - low)
            slow = network.value(made.slow_critic(data.inputs[b, t]))
            total = (
                total - advantage.item() * policy.log_prob(data.action[b, t]).item() - 0.01 * policy.entropy().item()
            )
            total = total + two_hot_loss(critic[b, t], returns[b, t]).item() + two_hot_loss(critic[b, t], slow).item()
            count += 1
    assert loss.item() == pytest.approx(total / count, rel=1e-4)


def test_the_slow_critic_regularises_and_does_not_bootstrap() -> None:
    made, data = learner(), experience()
    _, before = made.loss(data)
    for parameter in made.slow_critic.parameters():
        parameter.data += 1.0
    _, after = made.loss(data)
    assert before["return"] == after["return"]
    start = [parameter.clone() for parameter in made.slow_critic.parameters()]
    made.update(data)
    for old, slow, new in zip(start, made.slow_critic.parameters(), made.network.critic.parameters(), strict=True):
        assert torch.allclose(slow, 0.98 * old + 0.02 * new, atol=1e-6)
        assert not slow.requires_grad  # else every update adds to a graph


def test_gradients_reach_the_actor_through_log_probabilities_alone() -> None:
    """Of a bandit with two arms: d loss / d logit_a = -A (1[a] - p_a)."""
    config = replace(TINY, entropy_coef=0.0, percentiles=(), slow_decay=0.0, td_lambda=1.0)
    made = learner(config, actions=2)
    data = experience(1, 1)
    data = replace(data, action=torch.tensor([[1]]), terminated=torch.tensor([[True]]), reward=torch.tensor([[3.0]]))
    made.loss(data)[0].backward()
    network = made.network
    p = network.actor(data.inputs[:, 0]).softmax(-1)[0]
    advantage = 3.0 - network.value(network.critic(data.inputs[:, 0]))[0]
    last = network.actor[-1]
    assert isinstance(last, torch.nn.Linear)
    assert last.bias.grad is not None
    assert torch.allclose(last.bias.grad, -advantage * (torch.tensor([0.0, 1.0]) - p), atol=1e-5)
    # Nor does the critic learn from the actor's gain: its gradient is that of its own loss.
    learned = network.critic[-1].bias.grad.clone()
    network.zero_grad()
    network.critic_loss(network.critic(data.inputs[:, 0]), torch.tensor([3.0])).sum().backward()
    assert torch.allclose(learned, network.critic[-1].bias.grad, atol=1e-6)


def test_the_scale_is_the_moving_range_between_percentiles_and_at_least_one() -> None:
    scale = PercentileScale((5.0, 95.0), 0.99)
    returns = torch.arange(101.0)
    assert scale.update(returns) == pytest.approx(90.0)
    assert scale.update(returns * 2) == pytest.approx(0.99 * 90 + 0.01 * 180)
    assert PercentileScale((5.0, 95.0), 0.99).update(returns / 1000) == 1.0
    assert PercentileScale((), 0.99).update(returns) == 1.0


def test_a_truncated_step_bootstraps_from_its_own_last_frame() -> None:
    made, data = learner(), experience()
    cut = torch.zeros_like(data.terminated)
    cut[:, 2] = True
    plain = replace(data, terminated=torch.zeros_like(cut), truncated=cut, valid=torch.ones_like(cut))
    worth = replace(plain, final_value=torch.full_like(data.reward, 50.0))
    assert made.loss(worth)[1]["return"] > made.loss(plain)[1]["return"] + 5


@pytest.mark.parametrize("inputs", [(5,), (6, 4, 1)])
def test_steps_equal_the_whole_and_an_episode_begins_with_an_empty_memory(inputs: tuple[int, ...]) -> None:
    config = replace(TINY, memory=8, channels=() if len(inputs) == 1 else (4, 8))
    network, data = learner(config, inputs).network, experience(inputs=inputs, memory=8)
    first = data.first.clone()
    first[1, 3] = True
    whole = network(data.inputs, first, data.memory)
    memory, logits = data.memory, []
    for t in range(7):
        out = network.step(data.inputs[:, t], first[:, t], memory)
        memory = out.memory
        logits.append(out.logits)
    assert torch.allclose(torch.stack(logits, 1), whole.logits, atol=1e-5)
    assert torch.allclose(memory, whole.memory, atol=1e-5)
    changed = data.inputs.clone()
    changed[:, :3] += 1.0
    after = network(changed, first, data.memory).logits[:, 3:]
    assert torch.allclose(after[1], whole.logits[1, 3:], atol=1e-5)
    assert not torch.allclose(after[0], whole.logits[0, 3:], atol=1e-5)


def test_a_memory_begins_by_keeping() -> None:
    """What was seen once is still told after twelve steps of nothing else, before anything is learned."""
    torch.manual_seed(0)
    network = ActorCriticNetwork(ActorCriticConfig(hidden=16, memory=32), (5,), 3)
    seen = torch.zeros(2, 13, 5)
    seen[0, 0] = 3.0
    first = torch.zeros(2, 13, dtype=torch.bool)
    _, once = network.remember(seen[:, :1], first[:, :1], network.initial(2, torch.device("cpu")))
    _, later = network.remember(seen, first, network.initial(2, torch.device("cpu")))
    cell = slice(32, 64)
    assert (later[0, cell] - later[1, cell]).norm() > 0.1 * (once[0, cell] - once[1, cell]).norm()
    _, as_before = network.remember(seen[:, :0], first[:, :0], once)  # a burn-in of one step has none before it
    assert torch.equal(as_before, once)


def test_it_learns_which_arm_pays_where() -> None:
    made = learner(replace(TINY, hidden=32))
    for seed in range(150):
        data = experience(32, 4, seed=seed)
        right = (data.inputs[:, :-1, 0] > 0).long()
        data = replace(data, action=_play(made.network, data.inputs[:, :-1]))
        made.update(replace(data, reward=(data.action == right).float(), terminated=torch.zeros_like(data.terminated)))
    inputs = experience(200, 1, seed=999).inputs[:, :-1]
    assert (_play(made.network, inputs) == (inputs[..., 0] > 0)).float().mean() > 0.85


def _play(network: ActorCriticNetwork, inputs: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Categorical(logits=network.actor(inputs)).sample()


def test_a_restored_learner_goes_on_as_the_one_it_was() -> None:
    made, other = learner(), ActorCriticLearner(ActorCriticNetwork(TINY, (5,), 3), TINY)
    made.update(experience())
    other.load_state_dict(copy.deepcopy(made.state_dict()))
    assert made.update(experience(seed=2)) == other.update(experience(seed=2))
    assert made.update(experience(seed=3)) == other.update(experience(seed=3))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("percentiles", (95.0, 5.0), "percentiles: .* rising"),
        ("percentiles", (5.0, 101.0), "percentiles: .* within 0 to 100"),
        ("gamma", 1.5, "gamma: must be between 0 and 1, got 1.5"),
        ("slow_decay", -0.1, "slow_decay: must be between 0 and 1, got -0.1"),
        ("hidden", 0, "hidden: must be above 0, got 0"),
        ("entropy_coef", -1.0, "entropy_coef: must be at least 0, got -1.0"),
    ],
)
def test_settings_out_of_range_are_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **{key: value})


def test_an_encoder_that_does_not_fit_the_inputs_is_refused() -> None:
    with pytest.raises(ValueError, match="channels"):
        ActorCriticNetwork(TINY, (6, 4, 1), 3)
