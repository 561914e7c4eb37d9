"""Where the slots of a frame stand: rotary angles over (x, y, t), or over the place in one long row (TWISTED, appendix
C).

Shape suffixes: B batch, S slots of all frames in one row, P coordinates, E width of one head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loopwm.core import rotary_angles

SPATIAL_SHARE = 3, 4
"""Of the pairs of a head, so many turn with space, those of the highest frequencies (VideoRoPE)."""


class Rotary(Protocol):
    """Turns positions into what `AttentionInputs` takes."""

    @property
    def coordinates(self) -> int:
        """P."""
        ...

    def angles(self, positions_BSP: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin: two tensors (B, 1, S, E) in float32."""
        ...


@dataclass(frozen=True)
class Rotary1D:
    """One coordinate, the place in the sequence: plain rotary embedding, to compare with."""

    head_dim: int
    theta: float = 10000.0
    coordinates: int = 1

    def angles(self, positions_BSP: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_angles(positions_BSP[..., 0], self.head_dim, self.theta)


@dataclass(frozen=True)
class Rotary3D:
    """Three coordinates (x, y, t). By falling frequency the pairs of a head turn with x, y, x, y, ..., t, t.

    The paper rotates neighbouring dimensions (2i, 2i + 1), the core (i, i + E/2): the same scores under one permutation
    of a head's dimensions, which learned projections absorb. Raises ValueError if x and y cannot get as many pairs.
    """

    head_dim: int
    theta: float = 10000.0
    coordinates: int = 3

    def __post_init__(self) -> None:
        spatial, of = SPATIAL_SHARE
        if self.head_dim * spatial % (4 * of):
            raise ValueError(f"head_dim: {self.head_dim} is not divisible by 16: x and y need as many pairs each")

    @property
    def axes(self) -> list[int]:
        """The coordinate of each pair, by falling frequency: three for space to one for time, as in VideoRoPE."""
        spatial, of = SPATIAL_SHARE
        pairs = self.head_dim // 2
        turned_by_space = pairs * spatial // of
        return [0, 1] * (turned_by_space // 2) + [2] * (pairs - turned_by_space)

    def angles(self, positions_BSP: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, self.head_dim, 2, device=positions_BSP.device, dtype=torch.float32)
        frequencies = self.theta ** (-steps / self.head_dim)
        angles = positions_BSP[..., self.axes].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos(), angles.sin()
