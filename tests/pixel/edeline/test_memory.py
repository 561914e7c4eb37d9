"""The memory's contract: stepping equals the whole, episodes stay apart, nothing leaks, old steps count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loopwm.core.depth import DepthPlan
from loopwm.pixel.dynamics import replace_rows
from loopwm.pixel.edeline.memory import Memory, MemoryConfig

B, T, D = 3, 7, 16
CONFIG = MemoryConfig(dim=D, heads=2, mlp_dim=32, window=20, max_loops=4)


def made():
    torch.manual_seed(0)
    memory = Memory(CONFIG)
    with torch.no_grad():
        for parameter in memory.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.6 * parameter.shape[1] ** -0.5)
    return memory.eval()


@pytest.fixture
def memory():
    return made()


@pytest.fixture
def played():
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(0))
    first = torch.zeros(B, T, dtype=torch.bool)
    first[1, 2] = first[2, 0] = first[2, 4] = True
    return x, first


@torch.no_grad()
def test_stepping_equals_the_whole_wherever_it_is_cut(memory, played):
    x, first = played
    whole = memory(x, first, 2).h
    state, h = memory.initial(B, x.device), []
    for t in range(T):
        out = memory.step(x[:, t], first[:, t], 2, state)
        state = out.state
        h.append(out.h)
    assert torch.allclose(torch.stack(h, 1), whole, atol=1e-5)
    for cut in (1, 4):
        head = memory(x[:, :cut], first[:, :cut], 2)
        tail = memory(x[:, cut:], first[:, cut:], 2, head.state)
        assert torch.allclose(torch.cat((head.h, tail.h), 1), whole, atol=1e-5)


@torch.no_grad()
def test_first_isolates_episodes_and_nothing_leaks_from_later_steps(memory, played):
    x, first = played
    whole = memory(x, first, 2).h
    assert torch.allclose(memory(x[2:, 4:], first[2:, 4:], 2).h, whole[2:, 4:], atol=1e-5)
    changed = x.clone()
    changed[:, 4] += 1
    after = memory(changed, first, 2).h
    assert torch.equal(after[:, :4], whole[:, :4])
    assert ((after[:, 4] - whole[:, 4]).abs().amax(-1) > 1e-3).all()


def test_the_gradient_of_a_late_loss_reaches_an_early_input(memory, played):
    x = played[0].clone().requires_grad_()
    plan = DepthPlan((4,) * B, 2, tuple(range(B)))
    none = torch.zeros(B, T, dtype=torch.bool)
    # Cubes: the sum of squares behind a norm is always the same.
    memory(x, none, plan).h[:, -1].pow(3).sum().backward()
    assert (x.grad[:, 0].abs().sum(-1) > 1e-7).all()


@torch.no_grad()
def test_rows_begun_anew_go_on_as_if_alone(memory, played):
    x, _ = played
    free = torch.zeros(B, T, dtype=torch.bool)
    for before, fresh_before in ((4, 2), (1, 3)):
        state = memory(x[:, :before], free[:, :before], 2).state
        fresh = memory(x[:1, :fresh_before] + 1, free[:1, :fresh_before], 2).state
        mixed = replace_rows(state, torch.tensor([1]), fresh)
        found = memory.step(x[:, 6], free[:, 6], 2, mixed).h
        alone = memory.step(x[1:2, 6], free[1:2, 6], 2, fresh).h
        rest = memory.step(x[:, 6], free[:, 6], 2, state).h
        assert torch.allclose(found[1], alone[0], atol=1e-5)
        assert torch.allclose(found[[0, 2]], rest[[0, 2]], atol=1e-5)


def test_depth_is_drawn_by_row_in_training(memory, played):
    out = memory(*played, DepthPlan((1, 4, 2), 1, (7, 8, 9)))
    assert out.loops[:, 0].tolist() == [1, 4, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, r"dim: must be divisible by heads \(3\), got 16"),
        ({"window": 0}, "window: must be at least 1, got 0"),
        ({"dim": 0}, "dim: must be at least 1, got 0"),
    ],
)
def test_impossible_sizes_name_their_key(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)
