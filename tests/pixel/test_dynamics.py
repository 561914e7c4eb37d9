"""Contracts of frame dynamics: stepping equals the whole, episodes stay apart, nothing leaks from later frames."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loopwm.core.depth import DepthPlan
from loopwm.core.looped import CoreConfig
from loopwm.pixel.dynamics import LoopedAttention, space_time_axes

B, T, N, D, WINDOW = 3, 6, 5, 32, 4
CONFIG = CoreConfig(
    dim=D, heads=2, head_dim=16, mlp_dim=64, prelude_layers=1, block_layers=1, coda_layers=1, max_loops=6,
    norm_eps=1e-6,
)  # fmt: skip


def made(axes=None, window=WINDOW):
    """A core whose layers all do something."""
    torch.manual_seed(0)
    dynamics = LoopedAttention(CONFIG, window, space_time_axes(16) if axes is None else axes)
    with torch.no_grad():
        for parameter in dynamics.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3 * parameter.shape[1] ** -0.5 * 2)
    return dynamics.eval()


@pytest.fixture
def dynamics():
    return made()


@pytest.fixture
def frames():
    return made_frames()


def made_frames(steps=T, coordinates=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, steps, N, D, generator=generator)
    positions = torch.randint(0, 9, (B, steps, N, coordinates), generator=generator)
    first = torch.zeros(B, steps, dtype=torch.bool)
    first[1, 2] = first[2, 0] = first[2, 4] = True
    return x, positions, first


@torch.no_grad()
def test_a_state_is_not_changed_by_steps_from_it(dynamics, frames):
    x, positions, first = frames
    state = dynamics(x[:, :2], positions[:, :2], first[:, :2], 2).state
    ours, _, again = (dynamics.step(x[:, t], positions[:, t], first[:, t], 2, state) for t in (3, 4, 3))
    assert torch.equal(ours.h, again.h)


@pytest.mark.parametrize("rule", [1, 4])
@torch.no_grad()
def test_stepping_equals_the_whole(dynamics, frames, rule):
    x, positions, first = frames
    whole = dynamics(x, positions, first, rule)
    state, h, loops = dynamics.initial(B, x.device), [], []
    for t in range(T):
        out = dynamics.step(x[:, t], positions[:, t], first[:, t], rule, state)
        state = out.state
        h.append(out.h)
        loops.append(out.loops)
    assert torch.equal(torch.stack(loops, 1), whole.loops)
    assert torch.allclose(torch.stack(h, 1), whole.h, atol=1e-4)


@torch.no_grad()
def test_the_whole_may_be_cut_anywhere(dynamics, frames):
    x, positions, first = frames
    whole = dynamics(x, positions, first, 3).h
    for cut in (1, T - 1):
        head = dynamics(x[:, :cut], positions[:, :cut], first[:, :cut], 3)
        tail = dynamics(x[:, cut:], positions[:, cut:], first[:, cut:], 3, head.state)
        assert torch.allclose(torch.cat((head.h, tail.h), 1), whole, atol=1e-4)


@torch.no_grad()
def test_first_isolates_episodes(dynamics, frames):
    x, positions, first = frames
    out = dynamics(x, positions, first, 3).h
    alone = dynamics(x[2:, 4:], positions[2:, 4:], first[2:, 4:], 3).h
    assert torch.allclose(out[2:, 4:], alone, atol=1e-4)
    changed = x.clone()
    changed[2, :4] += 1
    assert torch.equal(dynamics(changed, positions, first, 3).h[2, 4:], out[2, 4:])


@torch.no_grad()
def test_nothing_leaks_from_later_frames_and_slots_of_a_frame_see_each_other(dynamics, frames):
    x, positions, first = frames
    out = dynamics(x, positions, first, 3).h
    changed = x.clone()
    changed[:, 3, 0] += 1
    after = dynamics(changed, positions, first, 3).h
    assert torch.equal(after[:, :3], out[:, :3])
    assert ((after[:, 3] - out[:, 3]).abs().amax(-1) > 1e-3).all()


@torch.no_grad()
def test_attention_sees_a_window_of_frames():
    dynamics, (x, positions, _) = made(), made_frames()
    free = torch.zeros(B, T, dtype=torch.bool)
    changed = x.clone()
    changed[:, 0] += 1
    # Through prelude, three loops and coda the reach is five windows; one layer of attention shows the mask itself.
    mask = dynamics._mask(torch.zeros(B, T, dtype=torch.long), T, N)[0, 0]
    seen = mask.view(T, N, T, N).float().mean((1, 3))
    frame = torch.arange(T)
    assert torch.equal(seen.bool(), (frame[None] <= frame[:, None]) & (frame[None] > frame[:, None] - WINDOW))
    assert not torch.equal(dynamics(changed, positions, free, 3).h[:, 3], dynamics(x, positions, free, 3).h[:, 3])
    assert dynamics(x, positions, free, 3).state.columns.length == (WINDOW - 1) * N


def test_the_gradient_of_a_late_loss_reaches_an_early_input():
    dynamics = made(window=20)
    x, positions, _ = made_frames(9)
    x.requires_grad_()
    plan = DepthPlan((4,) * B, 2, tuple(range(B)))
    dynamics(x, positions, torch.zeros(B, 9, dtype=torch.bool), plan).h[:, 8].square().sum().backward()
    assert (x.grad[:, 0].abs().sum((1, 2)) > 1e-6).all()


def test_rows_of_sampled_depth_do_not_depend_on_each_other(dynamics, frames):
    x, positions, first = frames
    plan = DepthPlan((1, 5, 3), 2, (7, 8, 9))
    together = dynamics(x, positions, first, plan)
    assert torch.equal(together.loops, torch.tensor(plan.loops)[:, None].expand(-1, T))
    for row in range(B):
        alone = replace(plan, loops=plan.loops[row : row + 1], noise_seeds=plan.noise_seeds[row : row + 1])
        out = dynamics(x[row : row + 1], positions[row : row + 1], first[row : row + 1], alone)
        assert torch.allclose(out.h[0], together.h[row], atol=1e-4)


@torch.no_grad()
def test_rows_of_a_cache_can_be_taken(frames):
    dynamics, (x, positions, first) = made(axes=()), made_frames(coordinates=1)
    state = dynamics(x[:, :4], positions[:, :4], first[:, :4], 3).state
    rows = torch.tensor([2, 0, 2])
    more = x[rows, 4], positions[rows, 4], first[rows, 4]
    taken = dynamics.step(*more, 3, state.select(rows)).h
    assert torch.allclose(taken, dynamics.step(x[:, 4], positions[:, 4], first[:, 4], 3, state).h[rows], atol=1e-5)


def test_a_depth_beyond_the_limit_is_refused(dynamics, frames):
    with pytest.raises(ValueError, match=r"depth: must be 1 to .*got 7 loops"):
        dynamics(*frames, 7)
