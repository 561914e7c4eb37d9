"""Rotary scores over (x, y, t) depend on position differences only, and are the paper's."""

from __future__ import annotations

import pytest
import torch

from loopwm.core.block import rotate
from loopwm.pixel.dynamics import axial_angles, space_time_axes

WIDTH = 32


def scores(axes, q, k, positions):
    cos, sin = axial_angles(positions, axes)
    return rotate(q, cos, sin) @ rotate(k, cos, sin).mT


@pytest.fixture
def qk():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 1, 3, 7, WIDTH, generator=generator)


def random_positions(coordinates):
    return torch.randint(0, 20, (1, 7, coordinates), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("axes", "coordinates"), [([0] * (WIDTH // 2), 1), (space_time_axes(WIDTH), 3)])
def test_scores_depend_on_position_differences_only(axes, coordinates, qk):
    positions = random_positions(coordinates)
    shift = torch.tensor([5, -3, 11])[:coordinates]
    moved = scores(axes, *qk, positions + shift)
    assert torch.allclose(scores(axes, *qk, positions), moved, atol=1e-4)
    assert not torch.allclose(moved, scores(axes, *qk, positions.flip(1)), atol=1e-2)


def test_scores_equal_the_block_diagonal_rotations_of_the_paper(qk):
    """R_xy and R_t as printed turn neighbouring dimensions; the core's pairs are (i, i + E/2)."""
    axes, positions = space_time_axes(WIDTH), random_positions(3)
    pairs = WIDTH // 2
    neighbours = torch.stack((torch.arange(pairs), torch.arange(pairs) + pairs), 1).flatten()
    turned = []
    for vectors in qk[:, 0]:
        out = torch.zeros_like(vectors)
        for token, (x, y, t) in enumerate(positions[0].tolist()):
            place = [x, y] * 6 + [t] * 4
            matrix = torch.zeros(WIDTH, WIDTH)
            for pair in range(pairs):
                angle = torch.tensor(place[pair] * 10000.0 ** (-2 * pair / WIDTH))
                block = torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])
                matrix[2 * pair : 2 * pair + 2, 2 * pair : 2 * pair + 2] = block
            out[:, token] = vectors[:, token][:, neighbours] @ matrix.T
        turned.append(out)
    assert torch.allclose(scores(axes, *qk, positions)[0], turned[0] @ turned[1].mT, atol=1e-4)


def test_three_of_four_pairs_turn_with_space_and_those_are_the_fast_ones():
    assert space_time_axes(16) == [0, 1, 0, 1, 0, 1, 2, 2]


def test_a_head_that_x_and_y_cannot_share_is_refused():
    with pytest.raises(ValueError, match=r"head_dim: .*, got 24"):
        space_time_axes(24)
