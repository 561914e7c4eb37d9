"""Rotary embeddings of frame slots: over (x, y, t), or over the index in one sequence (TWISTED, appendix C).

Shape suffixes: B batch, S slots of all frames in one row, P coordinates, E width of one head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loopwm.core import rotary_angles

SPATIAL_SHARE = 3, 4
"""Share of a head's pairs that rotate with space, those of the highest frequencies (VideoRoPE)."""


class Rotary(Protocol):
    """Rotary embedding of positions, as `AttentionInputs` takes it."""

    def angles(self, positions_BSP: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, two float32 tensors (B, 1, S, E)."""
        ...


@dataclass(frozen=True)
class Rotary1D:
    """Plain rotary embedding of the index in the sequence."""

    head_dim: int
    theta: float = 10000.0

    def angles(self, positions_BSP: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_angles(positions_BSP[..., 0], self.head_dim, self.theta)


@dataclass(frozen=True)
class Rotary3D:
    """Rotary embedding of (x, y, t). By falling frequency the pairs of a head rotate with x, y, x, y, ..., t, t.

    The paper rotates neighbouring dimensions (2i, 2i + 1), the core (i, i + E/2): the same scores under one permutation
    of a head's dimensions, which learned projections absorb.

    Raises:
        ValueError: x and y cannot get the same number of pairs
    """

    head_dim: int
    theta: float = 10000.0

    def __post_init__(self) -> None:
        spatial, of = SPATIAL_SHARE
        if self.head_dim * spatial % (4 * of):
            raise ValueError(f"head_dim: must be divisible by 16 for equal pairs of x and y, got {self.head_dim}")

    @property
    def axes(self) -> list[int]:
        """Coordinate of each pair, by falling frequency: three for space to one for time, as in VideoRoPE."""
        spatial, of = SPATIAL_SHARE
        pairs = self.head_dim // 2
        spatial_pairs = pairs * spatial // of
        return [0, 1] * (spatial_pairs // 2) + [2] * (pairs - spatial_pairs)

    def angles(self, positions_BSP: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, self.head_dim, 2, device=positions_BSP.device, dtype=torch.float32)
        frequencies = self.theta ** (-steps / self.head_dim)
        # Float32 whatever the model's dtype: bfloat16 rounds the angles of late frames.
        angles = positions_BSP[..., self.axes].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos(), angles.sin()
