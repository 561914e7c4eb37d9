"""U-Net over frames, conditioned on noise level and memory by adaptive group norm and cross-attention.

Each level has residual blocks of one width; the frame is halved between levels and doubled on the way up, where skip
connections are concatenated. A `stem` above 1 first folds stem x stem pixels into channels.

Shape suffixes: B batch, C channels, H/W frame, E width of the condition, K keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GROUP = 32
"""Channels per group of a group norm, unless the layer has fewer."""


@dataclass(frozen=True)
class UNetConfig:
    """Sizes of the U-Net; defaults are the paper's (EDELINE, table 9)."""

    channels: tuple[int, ...] = (64, 64, 64, 64)
    """Channels of each level."""
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    """Residual blocks per level on the way down; one more on the way up."""
    condition: int = 256
    """Width E of the condition."""
    stem: int = 1
    cross_attention: Literal["everywhere", "middle"] = "everywhere"
    """Cross-attention after the residual blocks of every level, or of the middle only, as in the published code."""
    heads: int = 4
    memory_map: int = 0
    """Channels of a memory map concatenated to the input; 0, as in the paper: norm and attention only.

    Norm and attention carry the same values to all places, so the network has to derive where an object belongs.
    """

    input_gain: bool = False
    """Add the first input channels to the output, times a gain from the condition.

    A stem folds more values into a place than the place has channels: the network cannot pass their noise on, so it
    cannot remove it either.
    """

    def __post_init__(self) -> None:
        sizes = (*self.channels, *self.blocks, self.stem, self.condition, self.heads)
        if not self.channels or min(sizes) < 1 or self.condition % 2:
            raise ValueError("channels, blocks, stem, condition, heads: must be at least 1, condition even")
        if self.memory_map < 0:
            raise ValueError(f"memory_map: must be at least 0, got {self.memory_map}")
        if len(self.channels) != len(self.blocks):
            raise ValueError(f"blocks: must have {len(self.channels)} numbers, one per level, got {self.blocks}")
        for width in self.channels:
            if width % self.heads or width % max(1, width // GROUP):
                groups = f"heads ({self.heads}) and groups of {GROUP}"
                raise ValueError(f"channels: must be divisible by {groups}, got {width}")

    def check(self, frame_shape: tuple[int, int, int]) -> None:
        """Check that frames can be halved once per level. Raises ValueError if a side is not divisible."""
        unit = self.stem * 2 ** (len(self.channels) - 1)
        for side in frame_shape[:2]:
            if side % unit:
                raise ValueError(
                    f"channels: {len(self.channels)} levels and a stem of {self.stem} halve frames that are divisible "
                    f"by {unit}, not {frame_shape[0]} x {frame_shape[1]}"
                )


class FourierFeatures(nn.Module):
    """Fourier features of a number (B,) at fixed random frequencies: (B, E)."""

    weight: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(width // 2))

    def forward(self, x: Tensor) -> Tensor:
        angles = 2 * math.pi * x[:, None] * self.weight
        return torch.cat((angles.cos(), angles.sin()), -1)


class AdaptiveGroupNorm(nn.Module):
    """Group norm with gain and bias projected from the condition (B, E)."""

    def __init__(self, channels: int, condition: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(max(1, channels // GROUP), channels, affine=False)
        self.project = nn.Linear(condition, 2 * channels)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        gain, bias = self.project(condition)[:, :, None, None].chunk(2, 1)
        return self.norm(x) * (1 + gain) + bias


class ResidualBlock(nn.Module):
    """Residual block x + conv(silu(norm(conv(silu(norm(x)))))) with conditioned norms; adds only a bias at first."""

    def __init__(self, inputs: int, outputs: int, condition: int) -> None:
        super().__init__()
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.first_norm, self.second_norm = AdaptiveGroupNorm(inputs, condition), AdaptiveGroupNorm(outputs, condition)
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        h = self.first(F.silu(self.first_norm(x, condition)))
        return self.skip(x) + self.second(F.silu(self.second_norm(h, condition)))


class CrossAttention(nn.Module):
    """Cross-attention of a feature map to a few keys (B, K, E): x + out(softmax(q k) v).

    Over one key the softmax is always 1; therefore memory and noise level are separate keys.
    """

    def __init__(self, channels: int, condition: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(max(1, channels // GROUP), channels)
        self.query = nn.Conv2d(channels, channels, 1)
        self.key_value = nn.Linear(condition, 2 * channels)
        self.out = nn.Conv2d(channels, channels, 1)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        q = self.query(self.norm(x)).flatten(2).unflatten(1, (self.heads, -1)).mT
        k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.key_value(keys).chunk(2, -1))
        attended = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(attended.mT.reshape(x.shape))  # (B, heads, H W, E) to a map


class Stage(nn.Module):
    """Residual blocks of one width, each followed by optional cross-attention."""

    def __init__(self, inputs: list[int], outputs: int, config: UNetConfig, attends: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(width, outputs, config.condition) for width in inputs)
        self.attentions = nn.ModuleList(
            CrossAttention(outputs, config.condition, config.heads) if attends else nn.Identity() for _ in inputs
        )

    def forward(self, x: Tensor, condition: Tensor, keys: Tensor, skips: list[Tensor] | None = None) -> list[Tensor]:
        """Return the map after each block.

        skips: maps that are concatenated to the blocks' inputs, last first; they are removed from the list
        """
        maps = []
        for block, attention in zip(self.blocks, self.attentions, strict=True):
            x = block(x if skips is None else torch.cat((x, skips.pop()), 1), condition)
            x = attention(x, keys) if isinstance(attention, CrossAttention) else x
            maps.append(x)
        return maps


class UNet(nn.Module):
    """U-Net (B, inputs, H, W) -> (B, outputs, H, W)."""

    def __init__(self, config: UNetConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.config = config
        unit, widths, everywhere = config.stem**2, config.channels, config.cross_attention == "everywhere"
        self.inwards = nn.Conv2d(inputs * unit + config.memory_map, widths[0], 3, padding=1)
        down, up, halves, doubles = [], [], [], []
        before = widths[0]
        for level, (width, count) in enumerate(zip(widths, config.blocks, strict=True)):
            halves.append(nn.Conv2d(before, before, 3, stride=2, padding=1) if level else nn.Identity())
            down.append(Stage([before] + [width] * (count - 1), width, config, everywhere))
            skips = [before, *[width] * count]
            after = widths[min(level + 1, len(widths) - 1)]  # of the map that comes up
            incoming = [after, *[width] * count]
            up.append(Stage([a + b for a, b in zip(incoming, reversed(skips), strict=True)], width, config, everywhere))
            doubles.append(nn.Conv2d(width, width, 3, padding=1) if level else nn.Identity())
            before = width
        self.down, self.up = nn.ModuleList(down), nn.ModuleList(up)
        self.halves, self.doubles = nn.ModuleList(halves), nn.ModuleList(doubles)
        self.middle = Stage([before, before], before, config, True)
        self.norm = nn.GroupNorm(max(1, widths[0] // GROUP), widths[0])
        self.outwards = nn.Conv2d(widths[0], outputs * unit, 3, padding=1)
        nn.init.zeros_(self.outwards.weight)
        self.input_gain = nn.Linear(config.condition, outputs) if config.input_gain else None

    def forward(self, x: Tensor, condition: Tensor, keys: Tensor, memory_map: Tensor | None = None) -> Tensor:
        """Run the network.

        Args:
            x: input (B, inputs, H, W)
            condition: (B, E)
            keys: (B, K, E)
            memory_map: (B, memory_map, H / stem, W / stem), None if that is 0
        """
        inputs, x = x, F.pixel_unshuffle(x, self.config.stem)
        x = self.inwards(x if memory_map is None else torch.cat((x, memory_map), 1))
        skips: list[list[Tensor]] = []
        for stage, halve in zip(self.down, self.halves, strict=True):
            x = halve(x)
            skips.append([x, *stage(x, condition, keys)])
            x = skips[-1][-1]
        x = self.middle(x, condition, keys)[-1]
        for level in reversed(range(len(skips))):
            x = self.up[level](x, condition, keys, skips[level])[-1]
            if level:
                x = self.doubles[level](F.interpolate(x, scale_factor=2.0))
        out = F.pixel_shuffle(self.outwards(F.silu(self.norm(x))), self.config.stem)
        if self.input_gain is None:
            return out
        return out + self.input_gain(condition)[:, :, None, None] * inputs[:, : out.shape[1]]
