"""STORM: the shapes of its tables, its losses by hand, and a world whose every way to the same state agrees."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from loopwm.pixel.dynamics import Depth, as_pixels
from loopwm.pixel.storm.images import IMAGES, SmallImages, StridedImages
from loopwm.pixel.storm.model import Storm, StormConfig, kl_divergence, log_probabilities, sample_latents
from loopwm.pixel.storm.system import StormObjective, StormSampling, StormState, StormSystem, StormWorld
from loopwm.pixel.system import FrameBatch, make_system
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace
from loopwm.trainer.config import OptimizerConfig
from loopwm.trainer.trainer import Trainer

SPACE = FrameSpace("made/up", "1", (6, 5, 2), 3)
TINY = StormConfig(
    groups=4, classes=5, image="small", stem=4, dim=16, heads=2, mlp_dim=32, coda_layers=1, positions=12, context=6
)
MODE = StormSampling(latents="mode")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def system(config: StormConfig = TINY, objective: StormObjective | None = None) -> StormSystem:
    """With weights that say something: fresh layers are the identity and heads are zero."""
    torch.manual_seed(0)
    made = StormSystem(config, objective or StormObjective(), SPACE)
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made.eval()


def batch(rows: int = 3, steps: int = 8, seed: int = 0) -> FrameBatch:
    torch.manual_seed(seed)
    first = torch.rand(rows, steps) < 0.2
    frames = ((torch.rand(rows, steps + 1, *SPACE.frame_shape) < 0.3) * 255).to(torch.uint8)
    nowhere = torch.zeros(rows, steps, dtype=torch.bool)
    ended = torch.cat((first[:, 1:], nowhere[:, :1]), 1)
    action, reward = torch.randint(3, (rows, steps)), torch.randn(rows, steps)
    return FrameBatch(frames[:, :-1], frames[:, 1:], action, reward, ended, nowhere, first)


# -- tables ------------------------------------------------------------------------------------------------------------


def shapes(module: nn.Sequential, x: torch.Tensor) -> list[tuple[int, ...]]:
    """Of what each convolution, linear layer or change of form puts out, for one item."""
    found = []
    for layer in module:
        x = layer(x)
        if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear, nn.Flatten, nn.Unflatten)):
            found.append(tuple(x.shape[1:]))
    return found


def test_images_have_the_shapes_of_tables_2_and_3() -> None:
    images = StridedImages((64, 64, 3), 1024, 32, 4)
    down = [(32, 32, 32), (64, 16, 16), (128, 8, 8), (256, 4, 4), (4096,), (1024,)]
    assert shapes(images.encoder, torch.zeros(2, 3, 64, 64)) == down
    up = [(4096,), (256, 4, 4), (128, 8, 8), (64, 16, 16), (32, 32, 32), (3, 64, 64)]
    assert shapes(images.decoder, torch.zeros(2, 1024)) == up


def test_the_network_has_the_sizes_of_tables_4_5_and_8() -> None:
    network = Storm(StormConfig(), FrameSpace("made/up", "1", (64, 64, 3), 18))
    linear = [(m.in_features, m.out_features) for m in network.mixer if isinstance(m, nn.Linear)]
    assert linear == [(1024 + 18, 512), (512, 512)]
    assert network.places.shape == (64, 512)
    assert (network.prior_head.in_features, network.prior_head.out_features) == (512, 1024)
    for head, outputs in ((network.reward_head, 255), (network.end_head, 1)):
        sizes = [(m.in_features, m.out_features) for m in head if isinstance(m, nn.Linear)]
        assert sizes == [(512, 512), (512, 512), (512, outputs)]
    assert StormSystem(StormConfig(), StormObjective(), FrameSpace("made/up", "1", (64, 64, 3), 18)).width == 1536


@pytest.mark.parametrize(("kind", "shape"), [("strided", (32, 16, 3)), ("small", (10, 5, 1)), ("small", (16, 16, 4))])
def test_a_frame_comes_back_in_its_own_shape(kind: str, shape: tuple[int, int, int]) -> None:
    images = IMAGES[kind](shape, 20, 4, 3)
    obs = torch.zeros(2, *shape, dtype=torch.uint8)
    decoded = images.decoder(images.encoder(as_pixels(obs)))
    frames = images.frames(decoded)
    assert frames.shape == obs.shape
    assert frames.dtype == torch.uint8
    assert images.compare(decoded, as_pixels(obs)).shape == (2,)


def test_reconstruction_is_summed_over_the_pixels_of_a_frame() -> None:
    decoded, target = torch.randn(2, 3, 4, 5), (torch.rand(2, 3, 4, 5) < 0.5).float()
    assert torch.allclose(StridedImages.compare(decoded, target)[1], ((decoded[1] - target[1]) ** 2).sum())
    p = decoded[1].sigmoid()
    nats = -(target[1] * p.log() + (1 - target[1]) * (1 - p).log()).sum()
    assert torch.allclose(SmallImages.compare(decoded, target)[1], nats, rtol=1e-4)


# -- latents and losses ------------------------------------------------------------------------------------------------


def test_a_hundredth_of_every_distribution_is_uniform() -> None:
    p = log_probabilities(torch.tensor([[30.0, 0.0, 0.0, 0.0]]), 0.01).exp()
    assert torch.allclose(p, torch.tensor([[0.99 + 0.0025, 0.0025, 0.0025, 0.0025]]), atol=1e-6)


def test_what_is_next_to_impossible_has_a_finite_kl_without_a_uniform_share() -> None:
    likely = torch.tensor([[200.0, 0.0]], requires_grad=True)
    kl = kl_divergence(log_probabilities(likely, 0.0), log_probabilities(-likely, 0.0))
    kl.backward()
    assert kl.item() == pytest.approx(200.0)
    assert likely.grad is not None
    assert likely.grad.isfinite().all()


def test_samples_are_one_hot_as_often_as_they_are_likely_and_pass_the_gradient_of_the_probabilities() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0]], requires_grad=True)
    log_p = log_probabilities(logits, 0.0)
    drawn = sample_latents(log_p.expand(20000, 1, 3), generator())
    assert torch.equal(drawn.detach().sum(-1).round(), torch.ones(20000, 1))
    assert torch.allclose(drawn.detach().mean((0, 1)), log_p.exp().detach()[0], atol=0.02)
    weights = torch.tensor([2.0, -3.0, 5.0])
    (sample_latents(log_p, generator())[0] @ weights).backward()
    through = logits.grad
    again = torch.tensor([[1.0, 0.0, -1.0]], requires_grad=True)
    (again.softmax(-1)[0] @ weights).backward()
    assert through is not None
    assert again.grad is not None
    assert torch.allclose(through, again.grad, atol=1e-6)


def test_kl_is_the_sum_over_groups_by_hand() -> None:
    q, p = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    by_hand = 0.5 * math.log(2) + 0.5 * math.log(2 / 3) + 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    assert kl_divergence(q.log(), p.log()).item() == pytest.approx(by_hand, rel=1e-5)


def by_hand(made: StormSystem, data: FrameBatch, depth: Depth) -> dict[str, float]:
    """The parts of the loss, step by step."""
    network = made.network
    posterior = network.encode(data.obs)
    z = sample_latents(posterior, generator())
    steps = data.action.shape[1]
    out = network.run(network.mix(z, data.action), torch.arange(steps).expand_as(data.action), data.first, depth)
    prior = network.prior(out.h[:, :-1], z[:, 1:])
    kls = [
        sum(float((q.exp() * (q - p)).sum()) for q, p in zip(posterior[b, t], prior[b, t - 1], strict=True))
        for b in range(len(data.first))
        for t in range(1, steps)
        if not data.first[b, t]
    ]
    return {"kl": float(np.mean(kls))}


@pytest.mark.parametrize("prior", ["factorised", "autoregressive"])
def test_the_prior_of_a_step_is_held_against_the_next_posterior_and_first_frames_are_left_out(prior: Any) -> None:
    made, data = system(replace(TINY, prior=prior)), batch()
    assert data.first[:, 1:].any()
    with torch.no_grad():
        total, count = made.loss(data, 2, generator())[1]["kl"]
        assert (total / count).item() == pytest.approx(by_hand(made, data, 2)["kl"], rel=1e-4)


@pytest.mark.parametrize("free", [0.0, 1.0, 5.5])
def test_the_loss_adds_its_terms_and_free_bits_are_of_the_mean(free: float) -> None:
    made, data = system(objective=StormObjective(free_bits=free)), batch()
    with torch.no_grad():
        loss, told = made.loss(data, 2, generator())
    parts = {name: (pair[0] / pair[1]).item() for name, pair in told.items()}
    kl = max(free, parts["kl"])
    expected = parts["reconstruction"] + parts["reward_loss"] + parts["done_loss"] + 0.6 * kl
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_below_the_free_bits_the_prior_is_not_trained_and_above_it_is() -> None:
    for free, trained in ((0.0, True), (6.0, False)):
        made = system(objective=StormObjective(free_bits=free))
        made.loss(batch(), 2, generator())[0].backward()
        gradient = made.network.prior_head.weight.grad
        assert (gradient is not None and bool(gradient.abs().sum() > 0)) == trained


def test_each_kl_term_trains_one_side() -> None:
    """Of the dynamics term the posterior learns nothing, of the representation term the prior learns nothing."""
    for objective, side in ((StormObjective(0.5, 0.0, 0.0), "prior"), (StormObjective(0.0, 0.1, 0.0), "posterior")):
        made, data = system(objective=objective), batch()
        head = made.network.prior_head.weight
        made.loss(data, 2, generator())[0].backward()
        trained = head.grad is not None and bool(head.grad.abs().sum() > 0)
        assert trained == (side == "prior")


@pytest.mark.parametrize("prior", ["factorised", "autoregressive"])
def test_the_dynamics_term_does_not_train_its_target(prior: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last frame is a target of the prior and no input of it: its gradient is that of the other terms."""
    data, gradients = batch(), []
    data.first[:, -1] = False
    for coefficient in (0.0, 0.5):
        made = system(replace(TINY, prior=prior), StormObjective(coefficient, 0.0, 0.0))
        posterior = made.network.encode(data.obs).detach().requires_grad_()
        monkeypatch.setattr(made.network, "encode", lambda obs, posterior=posterior: posterior)
        made.loss(data, 2, generator())[0].backward()
        assert posterior.grad is not None
        gradients.append(posterior.grad)
    assert torch.allclose(gradients[0][:, -1], gradients[1][:, -1], atol=1e-6)
    assert not torch.allclose(gradients[0][:, 0], gradients[1][:, 0], atol=1e-4)


def test_a_hundredth_of_the_prior_is_uniform() -> None:
    network = system().network
    network.prior_head.weight.data *= 1000
    h, z = torch.randn(7, 16), torch.zeros(7, 4, 5)
    assert network.prior(h, z).exp().min().item() == pytest.approx(0.01 / 5, rel=1e-3)


# -- the world ---------------------------------------------------------------------------------------------------------


def imagined(world: StormWorld, at: StormState, actions: torch.Tensor) -> list[StormState]:
    states, chance = [], generator(5)
    for action in actions.unbind(1):
        at = world.step(at, action, chance).state
        states.append(at)
    return states


def test_imagination_with_a_cache_equals_the_whole_sequence_without() -> None:
    made, data = system(), batch(steps=4)
    world = made.world(MODE)
    begun = world.start(data.obs, data.action[:, :-1], data.first, generator())
    actions = torch.randint(3, (3, 5))
    states = imagined(world, begun, actions)
    network = made.network
    z = torch.stack([begun.z, *(state.z for state in states[:-1])], 1)
    seen = torch.nn.functional.one_hot(network.encode(data.obs[:, :-1]).argmax(-1), 5).float()
    e = network.mix(torch.cat((seen, z), 1), torch.cat((data.action[:, :-1], actions), 1))
    first = torch.nn.functional.pad(data.first, (0, 4))
    h = network.run(e, torch.arange(8).expand(3, 8), first, made.config.default_depth).h
    for i, state in enumerate(states):
        assert torch.allclose(state.h, h[:, 3 + i], atol=1e-4)


@pytest.mark.parametrize("frames", [1, 4, 6, 9])
def test_stepping_in_the_real_world_equals_the_whole_of_the_last_frames(frames: int) -> None:
    """Nine frames are more than the six that are carried along."""
    world, data = system().world(MODE), batch(steps=9)
    chance = generator()
    at = world.start(data.obs[:, :1], data.action[:, :0], data.first[:, :1], chance)
    for t in range(1, frames):
        at = world.observe(at, data.action[:, t - 1], data.obs[:, t], data.first[:, t], chance)
    since = max(0, frames - TINY.context)
    window = slice(since, frames)
    whole = world.start(data.obs[:, window], data.action[:, since : frames - 1], data.first[:, window], chance)
    assert torch.allclose(world.features(at), world.features(whole), atol=1e-4)
    actions = torch.randint(3, (3, 4))
    for ours, theirs in zip(imagined(world, at, actions), imagined(world, whole, actions), strict=True):
        assert torch.allclose(world.features(ours), world.features(theirs), atol=1e-4)


def test_an_episode_begins_without_what_was_before() -> None:
    world, data = system().world(MODE), batch(steps=5)
    first = torch.zeros(3, 5, dtype=torch.bool)
    first[:, -1] = True
    at = world.start(data.obs, data.action[:, :-1], first, generator())
    alone = world.start(data.obs[:, -1:], data.action[:, :0], first[:, -1:], generator())
    assert torch.equal(world.features(at), world.features(alone))
    assert not at.h.any()


def test_imagination_goes_on_when_the_learned_positions_are_used_up() -> None:
    world, data = system().world(MODE), batch(steps=8)
    at = world.start(data.obs, data.action[:, :-1], data.first, generator())
    states = imagined(world, at, torch.randint(3, (3, 20)))
    assert all(state.longest <= TINY.positions for state in states)
    assert all(torch.isfinite(state.h).all() for state in states)


def test_states_are_not_changed_by_what_is_imagined_from_them_and_rows_are_replaced_one_by_one() -> None:
    world, data = system().world(MODE), batch(steps=5)
    actions = torch.randint(3, (3, 4))
    at = world.start(data.obs, data.action[:, :-1], data.first, generator())
    other = world.start(data.obs[1:2, 2:], data.action[1:2, 2:-1], data.first[1:2, 2:], generator())
    expected = [s.h[0] for s in imagined(world, at, actions)], [s.h[0] for s in imagined(world, other, actions[2:])]
    mixed = world.replace(at, torch.tensor([2]), other)
    found = imagined(world, mixed, actions)
    for t in range(4):
        assert torch.allclose(found[t].h[0], expected[0][t], atol=1e-4)
        assert torch.allclose(found[t].h[2], expected[1][t], atol=1e-4)


def test_a_world_begun_on_one_frame_sees_nothing_of_the_rows_that_it_joins() -> None:
    """In the middle of an episode, so that nothing but its place says that there is nothing before it."""
    world, data = system().world(MODE), batch(steps=5)
    nowhere = torch.zeros(3, 5, dtype=torch.bool)
    at = world.start(data.obs, data.action[:, :-1], nowhere, generator())
    other = world.start(data.obs[1:2, 4:], data.action[1:2, :0], nowhere[1:2, 4:], generator())
    actions = torch.randint(3, (3, 4))
    alone = imagined(world, other, actions[2:])
    for ours, theirs in zip(imagined(world, world.replace(at, torch.tensor([2]), other), actions), alone, strict=True):
        assert torch.allclose(ours.h[2], theirs.h[0], atol=1e-4)


def test_frames_are_shown_of_latents_in_training_too_as_in_evaluation() -> None:
    made, data = system(), batch(steps=5)
    world = made.world(MODE)
    at = world.start(data.obs, data.action[:, :-1], data.first, generator())
    shown = world.show(at)
    made.train()
    assert torch.equal(world.show(at), shown)
    assert made.training
    assert made.network.training
    assert shown.shape == (3, *SPACE.frame_shape)


@pytest.mark.slow
def test_it_learns_a_world_that_it_can_then_imagine() -> None:
    """A block goes where it is sent, and is paid on one side."""
    data = _walks(rows=24, steps=12)
    torch.manual_seed(0)
    made = StormSystem(replace(TINY, dim=32, stem=8, classes=8), StormObjective(free_bits=0.0), data[1])
    optimizer = torch.optim.Adam(made.parameters(), lr=3e-3)
    for step in range(150):
        optimizer.zero_grad()
        made.loss(data[0], made.plan(0, step, range(24)), generator(step))[0].backward()
        optimizer.step()
    world = made.eval().world()
    batch = data[0]
    at = world.start(batch.obs[:, :1], batch.action[:, :0], batch.first[:, :1], generator())
    right, error = [], []
    for t in range(5):
        found = world.step(at, batch.action[:, t], generator(t))
        at = found.state
        right.append((world.show(at) == batch.next_obs[:, t]).flatten(1).all(1).float().mean())
        error.append((found.reward - batch.reward[:, t]).abs().mean())
    assert torch.stack(right).mean() > 0.8
    assert torch.stack(error).mean() < 0.2


def _walks(rows: int, steps: int) -> tuple[FrameBatch, FrameSpace]:
    rng = np.random.default_rng(0)
    place, action = rng.integers(5, size=rows), rng.integers(3, size=(rows, steps))
    obs = np.zeros((rows, steps + 1, 5, 5, 1), np.uint8)
    reward = np.zeros((rows, steps), np.float32)
    for t in range(steps + 1):
        obs[np.arange(rows), t, 2, place] = 255
        if t < steps:
            place = np.clip(place + action[:, t] - 1, 0, 4)
            reward[:, t] = place == 4
    frames, no = torch.from_numpy(obs), torch.zeros(rows, steps, dtype=torch.bool)
    first = no.clone()
    first[:, 0] = True
    made = FrameBatch(frames[:, :-1], frames[:, 1:], torch.from_numpy(action), torch.from_numpy(reward), no, no, first)
    return made, FrameSpace("walk", "1", (5, 5, 1), 3)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "shape", "message"),
    [
        ({"image": "strided"}, (60, 64, 3), "model.halvings: must divide frames into 16 x 16, got 60 x 64"),
        ({"image": "small"}, (10, 17, 1), "model.image: small frames must be at most 16 x 16, got 10 x 17"),
    ],
)
def test_frames_that_the_encoder_cannot_take_are_refused(
    change: dict[str, str], shape: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make_system("storm", replace(TINY, **change), StormObjective(), FrameSpace("made/up", "1", shape, 3))


def test_a_context_longer_than_the_learned_positions_is_refused() -> None:
    data = batch(steps=13)
    with pytest.raises(InputError, match=r"context: must be at most model.positions \(12\) frames, got 13"):
        system().world().start(data.obs, data.action[:, :-1], data.first, generator())
    with pytest.raises(InputError, match=r"steps: segments must be at most model.positions \(12\), got 13"):
        system().loss(data, 2, generator())
    with pytest.raises(ValueError, match=r"context: must be between 2 and positions \(12\), got 13"):
        replace(TINY, context=13)


def test_coefficients_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"free_bits: must be at least 0, got -1.0"):
        StormObjective(free_bits=-1.0)
    with pytest.raises(InputError, match=r"objective.free_bits: must be at most 6.438 nats, got 7.0"):
        StormSystem(TINY, StormObjective(free_bits=7.0), SPACE)


def test_averaged_weights_are_refused_beside_batch_norm():
    config = SimpleNamespace(optimizer=OptimizerConfig(average=0.9))
    with pytest.raises(InputError, match=r"optimizer\.average: must be 0 for a model with batch norm"):
        Trainer._average(SimpleNamespace(config=config, _sharded=False, objective=system()))
