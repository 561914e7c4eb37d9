"""Gradient contracts: which term of a loss trains which group of parameters, one table a system.

`True` in a table means that the gradient of the term on the group is not zero. A loss must have the gradient of the
weighted sum of its terms, so that no term is cut off on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwm.core.depth import DepthPlan
from loopwm.pixel.agents import actor_critic
from loopwm.pixel.agents.actor_critic import ActorCriticConfig, Experience, dream
from loopwm.pixel.agents.ppo import PPOConfig, ppo_loss
from loopwm.pixel.agents.ppo_policy import ActorCritic
from loopwm.pixel.dynamics import masked_mean
from loopwm.pixel.edeline import system as edeline
from loopwm.pixel.edeline.config import EdelineLoss
from loopwm.pixel.storm import system as storm
from loopwm.pixel.storm.system import StormObjective
from loopwm.pixel.system import make_system
from loopwm.pixel.twisted import system as twisted
from loopwm.pixel.twisted.model import TokenBatch
from loopwm.pixel.twisted.system import TwistedCoefficients
from loopwm.records.frames import FrameSpace
from tests.pixel.agents import test_actor_critic, test_ppo
from tests.pixel.edeline import test_edeline
from tests.pixel.storm import test_storm
from tests.pixel.twisted.test_twisted import SMALL

Groups = Mapping[str, Iterable[Tensor]]
Table = dict[str, set[str]]
"""Term of a loss -> groups that it trains."""

SMALLEST = 1e-5
"""Share of a term's largest gradient below which a gradient is rounding."""


def gradients(term: Tensor, groups: Groups) -> dict[str, list[Tensor]]:
    """Return the gradient of a term on every tensor of every group, zeros where there is none."""
    tensors = {name: list(group) for name, group in groups.items()}
    flat = [tensor for group in tensors.values() for tensor in group]
    found = iter(torch.autograd.grad(term, flat, retain_graph=True, allow_unused=True, materialize_grads=True))
    return {name: [next(found) for _ in group] for name, group in tensors.items()}


def trained(term: Tensor, groups: Groups) -> set[str]:
    largest = {name: max(g.abs().max().item() for g in found) for name, found in gradients(term, groups).items()}
    return {name for name, size in largest.items() if size > SMALLEST * max(largest.values())}


def undetached(monkeypatch: pytest.MonkeyPatch, system: ModuleType) -> None:
    """Make the metrics of a system's loss the terms themselves."""
    monkeypatch.setattr(system, "mean_of", lambda mean, count: mean)


def check(loss: Tensor, terms: Mapping[str, tuple[float, Tensor]], groups: Groups, table: Table) -> None:
    """Compare with the table, and the loss with the sum of its terms, each a coefficient and a tensor."""
    assert {name: trained(term, groups) for name, (_, term) in terms.items()} == table
    whole, parts = gradients(loss, groups), [(c, gradients(term, groups)) for c, term in terms.values()]
    for name, found in whole.items():
        for i, gradient in enumerate(found):
            expected = sum(c * part[name][i] for c, part in parts)
            assert torch.allclose(gradient, expected, rtol=1e-3, atol=1e-4 * max(1.0, gradient.abs().max())), name


# -- worlds ------------------------------------------------------------------------------------------------------------

STORM_INPUTS = {"encoder", "mixer", "sequence"}
STORM: Table = {
    "reconstruction": {"encoder", "last posterior", "decoder"},
    "reward": {*STORM_INPUTS, "last posterior", "reward head"},
    "end": {*STORM_INPUTS, "last posterior", "end head"},
    "dynamics": {*STORM_INPUTS, "prior"},
    "representation": {"encoder", "last posterior"},
}
"""STORM, section 3.1. The last posterior is an input of reward and end only, and a target of both KL terms."""


@pytest.mark.parametrize("prior", ["factorised", "autoregressive"])
def test_terms_of_storm_train_their_groups(prior: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = StormObjective(dynamics_coef=0.7, representation_coef=0.3, free_bits=0.0)
    made, data = test_storm.system(replace(test_storm.TINY, prior=prior), objective), test_storm.batch()
    data.first[:, -1] = False  # else the last frame is no target
    network, posteriors, encode = made.network, [], made.network.encode

    def keep(obs: Tensor) -> Tensor:
        # Slices that join again, so that the last frame has a gradient of its own.
        *parts, last = encode(obs).split(1, 1)
        posteriors.append(last)
        return torch.cat((*parts, last), 1)

    monkeypatch.setattr(network, "encode", keep)
    undetached(monkeypatch, storm)
    loss, found = made.loss(data, 2, test_storm.generator())
    sequence = [network.places, *network.place_norm.parameters(), *network.dynamics.parameters()]
    groups = {
        "encoder": network.images.encoder.parameters(),
        "last posterior": posteriors,
        "decoder": network.images.decoder.parameters(),
        "mixer": network.mixer.parameters(),
        "sequence": [*sequence, *network.norm.parameters()],
        "prior": network.prior_head.parameters(),
        "reward head": network.reward_head.parameters(),
        "end head": network.end_head.parameters(),
    }
    groups = {name: list(group) for name, group in groups.items()}
    pixels, reward, end, dynamics = (found[name] for name in ("reconstruction", "reward_loss", "done_loss", "kl"))
    others = {"reconstruction": (1.0, pixels), "reward": (1.0, reward), "end": (1.0, end), "dynamics": (0.7, dynamics)}
    representation = (loss - sum(c * term for c, term in others.values())) / 0.3
    check(loss, others | {"representation": (0.3, representation)}, groups, STORM)


TWISTED_INPUTS = {"token embedding", "place embedding", "action embedding", "dynamics", "norm"}
TWISTED: Table = {
    "tokens": {*TWISTED_INPUTS, "token head"},
    "reward": {*TWISTED_INPUTS, "reward head"},
    "done": {*TWISTED_INPUTS, "done head"},
}
"""TWISTED, appendix B.2: three heads on one transformer. The codebook is not trained: it consists of bytes."""


def test_terms_of_twisted_train_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    space = FrameSpace("six", "1", (2 * SMALL.patch[0], 3 * SMALL.patch[1], 3), 4)
    made = make_system("twisted", SMALL, TwistedCoefficients(reward_coef=3.0, done_coef=5.0), space)
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    tokens, following = torch.randint(8, (2, 2, 3, 6))
    done = torch.rand(2, 3) < 0.5
    data = TokenBatch(tokens, following, torch.randint(4, (2, 3)), (torch.rand(2, 3) < 0.5).float(), done, done & ~done)
    undetached(monkeypatch, twisted)
    loss, found = made.token_loss(data, DepthPlan((2, 2), 2, (0, 1)))
    groups = {name.replace("_", " "): list(module.parameters()) for name, module in made.network.named_children()}
    assert not any(isinstance(value, nn.Parameter) for value in vars(made.tokenizer).values())
    terms = {"tokens": (1.0, found["loss"]), "reward": (3.0, found["reward_loss"]), "done": (5.0, found["done_loss"])}
    check(loss, terms, groups, TWISTED)


EDELINE_INPUTS = {"encoder", "action", "inwards", "memory"}
EDELINE: Table = {
    "frame": {*EDELINE_INPUTS, "unet", "noise", "memory key", "noise key", "memory map", "condition"},
    "reward": {*EDELINE_INPUTS, "reward head"},
    "end": {*EDELINE_INPUTS, "end head"},
    "preview": {*EDELINE_INPUTS, "memory map", "preview"},
    "contrast": {*EDELINE_INPUTS, "contrast"},
}
"""EDELINE, section 5.1: one memory, trained end to end by frames, rewards and ends; preview and contrast are ours."""


def test_terms_of_edeline_train_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(test_edeline.SMALL, unet=replace(test_edeline.SMALL.unet, memory_map=2))
    made = test_edeline.made(config, EdelineLoss(preview=0.5, contrast=0.25))
    made.harmonisers.data = torch.tensor([0.3, -0.4])
    undetached(monkeypatch, edeline)
    loss, found = made.loss(test_edeline.batch(), DepthPlan((2,) * 4, 2, (0, 1, 2, 3)), test_edeline.seeded())
    groups = {name.replace("_", " "): list(module.parameters()) for name, module in made.named_children()}
    frame, reward = torch.exp(-made.harmonisers.detach()).tolist()
    terms = {
        "frame": (frame, found["loss"]),
        "reward": (reward, found["reward_loss"]),
        "end": (1.0, found["done_loss"]),
        "preview": (0.5, found["preview_loss"]),
        "contrast": (0.25, found["contrast_loss"]),
    }
    check(loss, terms, groups, EDELINE)
    # Each harmoniser learns from its own term (EDELINE, equation 5, with log(1 + exp(s))).
    (learned,) = gradients(loss, {"harmonisers": [made.harmonisers]})["harmonisers"]
    errors = torch.stack((found["loss"], found["reward_loss"])).detach()
    s = made.harmonisers.detach()
    assert torch.allclose(learned, s.sigmoid() - torch.exp(-s) * errors, rtol=1e-4)


# -- agents ------------------------------------------------------------------------------------------------------------

ACTOR_CRITIC: Table = {
    "gain": {"encoder", "memory", "actor"},
    "entropy": {"encoder", "memory", "actor"},
    "critic": {"encoder", "memory", "critic"},
    "slow critic": {"encoder", "memory", "critic"},
}
"""STORM, section 3.2; EDELINE, equations 19 and 20. Returns, baseline and slow critic carry no gradient."""


def test_terms_of_the_actor_critic_train_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(test_actor_critic.TINY, memory=4, channels=(4, 8))
    made = test_actor_critic.learner(config, (6, 4, 1))
    for parameter in made.slow_critic.parameters():
        parameter.data += 0.3  # equal to the critic, it would add nothing
    means: list[Tensor] = []
    monkeypatch.setattr(actor_critic, "masked_mean", lambda x, valid: means.append(masked_mean(x, valid)) or means[-1])
    loss, _ = made.loss(test_actor_critic.experience(inputs=(6, 4, 1), memory=4))
    gain, entropy, critic, slow, *_ = means
    groups = {name: list(module.parameters()) for name, module in made.network.named_children()}
    terms = {"gain": (-1.0, gain), "entropy": (-0.01, entropy), "critic": (1.0, critic), "slow critic": (1.0, slow)}
    check(loss, terms, groups, ACTOR_CRITIC)
    assert not any(parameter.requires_grad for parameter in made.slow_critic.parameters())


def test_imagination_carries_no_gradient_to_the_world() -> None:
    world = test_storm.system().world(test_storm.MODE)
    data, chance = test_storm.batch(), test_storm.generator()
    network = test_actor_critic.learner(ActorCriticConfig(hidden=8), (world.width,)).network
    begun = world.start(data.obs, data.action[:, :-1], data.first, chance)
    experience: Experience = dream(world, network, begun, 3, chance)
    assert not any(value.requires_grad for value in vars(experience).values())


PPO_AGENT: Table = {
    "gain": {"encoder", "to memory", "memory", "actor trunk", "actor"},
    "entropy": {"encoder", "to memory", "memory", "actor trunk", "actor"},
    "value": {"encoder", "to memory", "memory", "critic trunk", "critic"},
}
"""TWISTED, appendix B.3.2."""


def test_terms_of_ppo_train_their_groups() -> None:
    torch.manual_seed(0)
    policy = ActorCritic(test_ppo.CONFIG, test_ppo.SHAPE, test_ppo.ACTIONS)
    data = test_ppo.made(policy)
    advantage, target = torch.randn(2, test_ppo.B, test_ppo.T)

    def loss(**coefficients: float) -> Tensor:
        return ppo_loss(policy, data, advantage, target, PPOConfig(**coefficients))[0]

    alone: Callable[..., Tensor] = lambda **of: loss(**of) - loss(value_coef=0.0, entropy_coef=0.0)  # noqa: E731
    terms = {
        "gain": (-1.0, -loss(value_coef=0.0, entropy_coef=0.0)),
        "entropy": (-0.02, -alone(value_coef=0.0, entropy_coef=1.0)),
        "value": (2.0, alone(value_coef=1.0, entropy_coef=0.0)),
    }
    groups = {name.replace("_", " "): list(module.parameters()) for name, module in policy.named_children()}
    trunks = groups.pop("trunks")
    half = len(trunks) // 2
    check(
        loss(value_coef=2.0, entropy_coef=0.02),
        terms,
        groups | {"actor trunk": trunks[:half], "critic trunk": trunks[half:]},
        PPO_AGENT,
    )
