"""EDELINE: preconditioners, sampler, harmonisers, cross-attention, and a world that steps as it trains."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from loopwm.core.depth import DepthPlan
from loopwm.pixel.edeline.auxiliary_losses import novelty, to_signed
from loopwm.pixel.edeline.config import EdelineConfig, EdelineLoss, EdelineSampling
from loopwm.pixel.edeline.memory import MemoryConfig
from loopwm.pixel.edeline.system import Edeline, harmonised, preconditioners, same_episode
from loopwm.pixel.edeline.unet import CrossAttention, UNet, UNetConfig
from loopwm.pixel.replay import Replay
from loopwm.pixel.system import FrameBatch
from loopwm.records.frames import FrameSpace
from tests.fixtures.blocks import played

SPACE = FrameSpace("blocks", "1", (6, 8, 3), 4)
SMALL = EdelineConfig(
    memory=MemoryConfig(dim=16, heads=2, mlp_dim=32),
    unet=UNetConfig(channels=(8, 16), blocks=(1, 1), condition=16, heads=2),
    encoder_channels=(8,),
    action_dim=4,
    head_hidden=16,
    frames=3,
    burn_in=3,
    rewards=(0.0, 1.0),
)


def made(config=SMALL, loss=None, seed=0):
    """A network whose layers all do something."""
    torch.manual_seed(seed)
    system = Edeline(config, loss or EdelineLoss(), SPACE)
    with torch.no_grad():
        for parameter in system.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5 * parameter[0].numel() ** -0.5)
    return system.eval()


def batch(rows=4, steps=8):
    replay = Replay(SPACE, 1000)
    for seed in range(12):
        replay.add(played(seed, 40))
    return FrameBatch.of(replay.sample(rows, steps, np.random.default_rng(0)))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"condition": 65}, "heads: must be at least 1, condition even"),
        ({"channels": (100,), "blocks": (1,)}, r"channels: must be divisible by heads \(4\) and groups of 32, got 100"),
    ],
)
def test_sizes_that_fit_no_layer_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        UNetConfig(**sizes)


def test_preconditioners_are_the_papers_and_keep_variance():
    sigma = torch.tensor([0.01, 0.5, 7.0])
    found = preconditioners(sigma)
    for i, s in enumerate(sigma.tolist()):
        assert found.c_in[i].item() == pytest.approx(1 / math.sqrt(s**2 + 0.25), rel=1e-5)
        assert found.c_out[i].item() == pytest.approx(0.5 * s / math.sqrt(s**2 + 0.25), rel=1e-5)
        assert found.c_noise[i].item() == pytest.approx(math.log(s) / 4, rel=1e-5)
        assert found.c_skip[i].item() == pytest.approx(0.25 / (s**2 + 0.25), rel=1e-5)
        # A network whose output has unit variance gives back data of deviation 0.5, whatever the noise.
        signal = found.c_skip[i] ** 2 * (0.25 + s**2)
        assert (signal + found.c_out[i] ** 2).item() == pytest.approx(0.25, rel=1e-4)


def test_the_samplers_levels_are_the_papers():
    assert EdelineSampling().sigmas() == pytest.approx([5.0, 0.283, 0.002, 0.0], abs=5e-4)
    assert EdelineSampling(steps=1).sigmas() == [5.0, 0.0]
    with pytest.raises(ValueError, match="rho: must be at least 1, got 0"):
        EdelineSampling(rho=0)


@torch.no_grad()
def test_without_noise_the_denoised_frame_is_the_frame():
    system, frame = made(), torch.rand(2, 3, 6, 8) * 2 - 1
    before, h = torch.zeros(2, 3, 3, 6, 8), torch.randn(2, 16)
    assert torch.allclose(system.denoised(frame, torch.full((2,), 1e-5), before, h), frame, atol=1e-4)
    assert not torch.allclose(system.denoised(frame, torch.full((2,), 1.0), before, h), frame, atol=1e-2)


@torch.no_grad()
def test_the_sampler_is_eulers_rule_on_a_known_denoiser(monkeypatch):
    """A denoiser that always sees one frame: every path ends there, and on the way is a mixture of it and the noise."""
    system, frame = made(), torch.full((1, 3, 6, 8), 1 / 255)
    monkeypatch.setattr(system, "denoised", lambda x, sigma, before, h: frame)
    before, h = torch.zeros(1, 3, 3, 6, 8), torch.zeros(1, 16)
    assert torch.allclose(system.sampled(before, h, EdelineSampling(), seeded()), frame, atol=1e-6)
    seen = []
    monkeypatch.setattr(system, "denoised", lambda x, sigma, before, h: seen.append(x) or frame)
    system.sampled(before, h, EdelineSampling(), seeded())
    noise = torch.randn(1, 3, 6, 8, generator=seeded())
    for x, sigma in zip(seen, (5.0, 0.2828), strict=False):
        assert torch.allclose(x, frame + (noise - frame) * sigma / 5.0, atol=1e-3)


@torch.no_grad()
def test_frames_are_drawn_from_as_much_noise_as_is_asked_for(monkeypatch):
    system, seen = made(), []
    before, h = torch.zeros(1, 3, 3, 6, 8), torch.zeros(1, 16)
    monkeypatch.setattr(system, "denoised", lambda x, sigma, before, h: seen.append(x) or torch.zeros_like(x))
    for sampling in (EdelineSampling(), EdelineSampling(noise="sigma_max")):
        system.sampled(before, h, sampling, seeded())
    unit, wide = seen[0], seen[3]
    assert torch.equal(wide, 5 * unit)
    assert unit.std().item() == pytest.approx(1, abs=0.15)


def test_harmonisers_are_bounded_below_and_balance():
    loss, s = torch.tensor(0.37), torch.tensor(0.2, requires_grad=True)
    harmonised(loss, s).backward()
    assert s.grad.item() == pytest.approx(-math.exp(-0.2) * 0.37 + 1 / (1 + math.exp(-0.2)), rel=1e-5)
    levels = torch.linspace(-20, 20, 401)
    assert all((harmonised(torch.tensor(x), levels) >= 0).all() for x in (0.0, 1e-6, 0.1, 10.0))
    # exp(-s) L + log(1 / w), as printed, has no such bound: at L = 0 it falls with s for ever.
    assert (torch.exp(levels) * 0.0 - levels).min() < -19


@torch.no_grad()
def test_over_one_key_attention_ignores_what_is_asked_and_over_two_it_does_not():
    torch.manual_seed(0)
    attention = CrossAttention(8, 16, 2)
    attention.out.weight.normal_()
    x, keys = torch.randn(1, 8, 3, 4), torch.randn(1, 2, 16)
    places = [(attention(x, some) - x).flatten(2) for some in (keys[:, :1], keys)]
    spread = [(place - place.mean(-1, keepdim=True)).abs().max().item() for place in places]
    assert spread[0] < 1e-5 < 1e-2 < spread[1]


@torch.no_grad()
def test_a_memory_that_is_laid_out_tells_places_apart_before_any_layer():
    """What a change of the memory does to the U-Net's first map: nothing without channels of its own; with them, at
    each place something else."""
    h = torch.zeros(2, 16)
    h[1] = 1
    for channels, stem in ((0, 1), (2, 1), (2, 2)):
        unet = replace(SMALL.unet, memory_map=channels, stem=stem, channels=(8,), blocks=(1,))
        system, seen = made(replace(SMALL, unet=unet)), []
        system.unet.inwards.register_forward_hook(lambda module, inputs, found, seen=seen: seen.append(found))
        system.network(torch.zeros(2, 3, 6, 8), torch.zeros(2), torch.zeros(2, 3, 3, 6, 8), h)
        change = (seen[0][1] - seen[0][0]).flatten(1)
        assert seen[0].shape == (2, 8, 6 // stem, 8 // stem)
        assert (change.std(1) > 1e-3).all() == bool(channels)
        assert (change.abs().sum() > 0) == bool(channels)


@pytest.mark.parametrize("gain", [False, True])
def test_noise_passes_a_narrow_stem_by_the_gain_alone(gain):
    """A stem of 2 folds 12 values into a place of 4 channels: through layers, 4 directions of noise come out."""
    torch.manual_seed(0)
    config = UNetConfig((4,), (1,), condition=8, stem=2, heads=1, cross_attention="middle", input_gain=gain)
    unet = UNet(config, 3, 3)
    for parameter in unet.parameters():
        nn.init.normal_(parameter, std=0.3)
    condition, keys = torch.ones(1, 8), torch.zeros(1, 2, 8)
    x = torch.randn(1, 3, 2, 2)
    change = torch.autograd.functional.jacobian(lambda x: unet(x, condition, keys).flatten(), x).view(12, 12)
    assert (int(torch.linalg.matrix_rank(change, atol=1e-3)) > 4) == gain


def test_frames_of_another_episode_are_left_out():
    begins = torch.tensor([[False, True, False], [False, False, True], [True, False, False], [False, False, False]])
    assert same_episode(begins).tolist() == [
        [False, True, True],
        [False, False, True],
        [True, True, True],
        [True, True, True],
    ]


def test_one_target_a_row_is_predicted_after_the_burn_in(monkeypatch):
    """From the memory of the step before, after the L frames up to it, and it is what the action led to."""
    system, played_steps = made(loss=EdelineLoss(own_frame=False)), batch()
    seen = []

    def frame_loss(target, before, h, generator):
        seen.append((target, before, h))
        return target.sum() * 0, target

    monkeypatch.setattr(system, "frame_loss", frame_loss)
    h, _ = system.remember(played_steps.obs, played_steps.action, played_steps.first, 1)
    for seed in range(20):
        system.loss(played_steps, 1, seeded(seed))
    places = set()
    for target, before, of in seen:
        for row in range(4):
            at = int((h[row] - of[row]).abs().sum(-1).argmin())
            places.add(at)
            assert torch.equal(target[row], to_signed(played_steps.next_obs[row, at]))
            assert torch.equal(before[row, -1], to_signed(played_steps.obs[row, at]))
    assert places == set(range(SMALL.burn_in - 1, 8))


def still_but_for_a_flash():
    """(1, 8) steps of one frame; the one that step 5 leads to is another."""
    steps = batch(1)
    obs = steps.obs[:, :1].expand_as(steps.obs).clone()
    obs[:, 6] = 255 - obs[:, 6]
    next_obs = torch.cat((obs[:, 1:], obs[:, :1]), 1)
    return steps._replace(obs=obs, next_obs=next_obs, first=torch.zeros(1, 8, dtype=torch.bool))


def test_what_differs_from_all_of_the_last_frames_is_new():
    steps = still_but_for_a_flash()
    found = novelty(steps, 3)[0]
    exact = (to_signed(steps.next_obs[0, 5]) - to_signed(steps.obs[0, 5])).norm()
    assert found[5].item() == pytest.approx(exact.item(), rel=1e-4)
    assert found[[0, 1, 2, 3, 4, 6, 7]].max() < 0.02 * exact  # the frame after the flash was there before it
    assert novelty(steps, 1)[0, 6].item() == pytest.approx(exact.item(), rel=1e-4)
    begins = steps.first.clone()
    begins[0, 6] = True
    assert novelty(steps._replace(first=begins), 3)[0, 6].item() == pytest.approx(exact.item(), rel=1e-4)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1 / 6), (0.6, 0.6 + 0.4 / 6), (1.0, 1.0)])
def test_a_share_of_the_targets_is_drawn_by_what_is_new(share, expected):
    system = made(loss=EdelineLoss(own_frame=False, novelty=share))
    steps = still_but_for_a_flash()
    at = system._sample_steps(system._chances(steps).repeat(4000, 1), seeded())
    assert set(at.tolist()) <= set(range(SMALL.burn_in - 1, 8))
    assert (at == 5).float().mean().item() == pytest.approx(expected, abs=0.03)


@torch.no_grad()
@pytest.mark.parametrize(("share", "chosen"), [(0.0, range(2, 8)), (1.0, [5])])
def test_the_next_frame_is_foreseen_at_every_step_after_the_burn_in(share, chosen):
    """Evenly, or, by novelty, at the one step that shows something new."""
    steps, config = still_but_for_a_flash(), replace(SMALL, unet=replace(SMALL.unet, memory_map=2))
    system = made(config, EdelineLoss(own_frame=False, preview=1.0, contrast=2.0, novelty=share))
    h, _ = system.remember(steps.obs, steps.action, steps.first, 1)
    frames = to_signed(steps.next_obs[0])
    # Steps 2 .. 7 lead to two different frames.
    logits = system.contrast(h[0], system.encoder(torch.stack((frames[2], frames[5]))))
    missed = torch.nn.functional.cross_entropy(logits, (torch.arange(8) == 5).long(), reduction="none")
    expected = {"preview": system.preview.error(system.memory_map(h[0]), frames), "contrast": missed}
    total, measured = system.loss(steps, 1, seeded())
    for name, each in expected.items():
        wanted = each[list(chosen)].mean().item()
        assert measured[f"{name}_loss"][0].item() == pytest.approx(8 * wanted, rel=1e-4), name
    without, _ = made(config, EdelineLoss(own_frame=False, novelty=share)).loss(steps, 1, seeded())
    assert total.item() > without.item()


def test_where_nothing_is_new_targets_are_drawn_evenly():
    steps = still_but_for_a_flash()
    steps = steps._replace(obs=torch.zeros_like(steps.obs), next_obs=torch.zeros_like(steps.obs))
    system = made(loss=EdelineLoss(novelty=1.0))
    at = system._sample_steps(system._chances(steps).repeat(4000, 1), seeded())
    assert torch.bincount(at)[SMALL.burn_in - 1 :].tolist() == pytest.approx([800] * 5, abs=100)


def test_the_own_frame_stands_for_the_last_one_in_the_second_step(monkeypatch):
    system, played_steps = made(), batch()
    seen = []

    def frame_loss(target, before, h, generator):
        seen.append(before)
        return target.sum() * 0, torch.full_like(target, 0.123)

    monkeypatch.setattr(system, "frame_loss", frame_loss)
    system.loss(played_steps, 1, seeded())
    first, second = seen
    own = (second[:, -1] == 0.123).flatten(1).all(1)
    assert own.any()
    assert not (first[:, -1] == 0.123).any()
    assert torch.equal(second[own][:, -2], first[own][:, -1])


def test_the_own_frame_stays_within_its_episode(monkeypatch):
    """Where an episode begins, the frame before it is not the model's; nor does the second step train the first."""
    system, steps, seen = made(), batch(), []
    everywhere = torch.ones_like(steps.first)

    def frame_loss(target, before, h, generator):
        seen.append(before)
        return target.sum() * 0, torch.full_like(target, 0.123)

    monkeypatch.setattr(system, "frame_loss", frame_loss)
    system.loss(steps._replace(first=everywhere), 1, seeded())
    assert not (seen[1][:, -1] == 0.123).any()
    assert not seen[0][:, :-1].any()  # nor do frames of other episodes condition
    assert seen[0][:, -1].any()


def test_the_denoised_frame_carries_no_gradient():
    system, steps = made(), batch()
    h, _ = system.remember(steps.obs, steps.action, steps.first, 1)
    before = to_signed(steps.obs[:, :3])
    loss, frame = system.frame_loss(to_signed(steps.next_obs[:, 3]), before, h[:, 3], seeded())
    assert loss.requires_grad
    assert not frame.requires_grad


@torch.no_grad()
def test_the_network_is_told_the_noise_with_its_offset(monkeypatch):
    """In training and in sampling: the level's square is the sum of both variances."""
    offset, seen = 0.3, []
    system = made(loss=EdelineLoss(offset_noise=offset, noise_std=0.0, noise_mean=math.log(0.4)))
    before, h = torch.zeros(2, 3, 3, 6, 8), torch.zeros(2, 16)
    network = system.network
    monkeypatch.setattr(system, "network", lambda x, c, *rest: seen.append(c) or network(x, c, *rest))
    system.frame_loss(torch.zeros(2, 3, 6, 8), before, h, seeded())
    system.sampled(before, h, EdelineSampling(steps=1), seeded())
    levels = [(4 * c[0]).exp().item() for c in seen]
    assert levels == pytest.approx([math.hypot(0.4, offset), math.hypot(5.0, offset)], rel=1e-5)


@torch.inference_mode()
def test_the_worlds_memory_is_that_of_training():
    """Whether frames come at once or one by one, h is what the loss was computed with."""
    system, steps = made(), batch()
    world, generator = system.world(), seeded()
    h, _ = system.remember(steps.obs, steps.action, steps.first, system.looped.default_depth)
    whole = world.start(steps.obs, steps.action[:, :-1], steps.first, generator)
    one = world.start(steps.obs[:, :1], steps.action[:, :0], steps.first[:, :1], generator)
    for t in range(1, 8):
        one = world.observe(one, steps.action[:, t - 1], steps.obs[:, t], steps.first[:, t], generator)
    for state in (whole, one):
        found, _ = world._remember(state, steps.action[:, -1])
        assert torch.allclose(found, h[:, -1], atol=1e-5)
    assert torch.equal(whole.frames, one.frames)
    assert torch.equal(world.show(one), steps.obs[:, -1])


@torch.inference_mode()
def test_worlds_begun_anew_go_on_as_if_alone():
    system, steps = made(), batch()
    world = system.world()
    state = world.start(steps.obs[:, :5], steps.action[:, :4], steps.first[:, :5], seeded())
    fresh = world.start(steps.obs[:1, 5:7], steps.action[:1, 5:6], steps.first[:1, 5:7], seeded())
    mixed = world.replace(state, torch.tensor([2]), fresh)
    action = torch.tensor([0, 1, 2, 3])
    found, alone, rest = (world._remember(s, a)[0] for s, a in ((mixed, action), (fresh, action[2:3]), (state, action)))
    assert torch.allclose(found[2], alone[0], atol=1e-5)
    assert torch.allclose(found[[0, 1, 3]], rest[[0, 1, 3]], atol=1e-5)
    assert torch.equal(world.show(mixed)[2], steps.obs[0, 6])


@torch.no_grad()
def test_features_are_what_would_be_known_after_each_action(monkeypatch):
    """What the reward is read from, action by action; asking changes nothing."""
    system, steps = made(), batch()
    world, read = system.world(), []
    state = world.start(steps.obs, steps.action[:, :-1], steps.first, seeded())
    state = replace(state, first=torch.tensor([True, False, False, False]))
    features = world.features(state)
    assert features.shape == (4, system.width)
    ahead = system.reward_head.forward
    monkeypatch.setattr(system.reward_head, "forward", lambda h: read.append(h) or ahead(h))
    for action in range(SPACE.actions):
        world.step(state, torch.full((4,), action), seeded())
    assert torch.allclose(features, torch.cat(read, -1), atol=1e-5)


@torch.no_grad()
def test_imagination_follows_its_generator_alone():
    world, steps = made().world(), batch()
    state = world.start(steps.obs, steps.action[:, :-1], steps.first, seeded())
    one, two, other = (world.step(state, steps.action[:, -1], seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(world.show(one.state), world.show(two.state))
    assert not torch.equal(world.show(one.state), world.show(other.state))
    assert world.show(one.state).shape == (4, *SPACE.frame_shape)
    assert set(one.reward.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("channels", "auxiliary"),
    [(0, {}), (2, {"preview": 1.0, "contrast": 1.0})],
)
def test_the_loss_reaches_every_parameter(channels, auxiliary):
    memory, unet = replace(SMALL.memory, max_loops=4), replace(SMALL.unet, memory_map=channels)
    system = made(replace(SMALL, memory=memory, unet=unet), EdelineLoss(**auxiliary))
    loss, measured = system.loss(batch(), DepthPlan((2,) * 4, 2, (0, 1, 2, 3)), seeded())
    loss.backward()
    assert not {name for name, p in system.named_parameters() if p.grad is None or not p.grad.abs().sum()}
    auxiliary_names = {f"{name}_loss" for name in auxiliary}
    assert set(measured) == {"loss", "reward_loss", "done_loss", "mean_depth", *auxiliary_names}
