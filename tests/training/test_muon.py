"""Our Muon is torch's, in a precision of its own, and orthogonalises."""

from __future__ import annotations

import torch
from torch import nn

from loopwm.trainer.optimizer import Muon, orthogonal

SHAPES = [(32, 128), (128, 32), (48, 48), (7, 64)]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in SHAPES]


def test_steps_are_those_of_torch_up_to_its_bfloat16():
    ours, theirs, begun = parameters(), parameters(), parameters()
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.3}
    optimizers = [Muon(ours, **settings), torch.optim.Muon(theirs, **settings, adjust_lr_fn="match_rms_adamw")]
    for step in range(3):
        for parameter, other in zip(ours, theirs, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
            other.grad = parameter.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for parameter, other, before in zip(ours, theirs, begun, strict=True):
        moved = (other - before).norm()
        assert (parameter - other).norm() < 0.02 * moved


def test_an_update_keeps_the_directions_of_a_matrix_and_brings_its_singular_values_near_one():
    for shape in SHAPES:
        matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        found = u.T @ orthogonal(matrix[None])[0] @ v.T
        values = found.diagonal()
        assert 0.6 < values.min() <= values.max() < 1.3
        assert (found - values.diag()).abs().max() < 1e-4


def test_a_parameter_without_gradient_stays():
    first, second = parameters()[:2]
    before = second.detach().clone()
    first.grad = torch.ones_like(first)
    Muon([first, second], lr=0.1, momentum=0.9, weight_decay=0.1).step()
    assert torch.equal(second, before)
