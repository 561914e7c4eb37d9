"""Auxiliary memory losses (ours): linear next-frame reconstruction and contrastive next-frame choice.

A squared pixel error hardly counts small objects, and those often have to be remembered: the two cues of a maze differ
by a ten-thousandth of it. So the reconstruction loss is a root per patch, and the contrastive loss separates frames
that differ in a few pixels as much as any others.

Shape suffixes: N steps, U unique frames, C channels, H/W frame, D memory, K projection, E encoded frame.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.pixel.system import FrameBatch

LEVELS = 255
SMALLEST = 1e-4
"""Added to a patch's mean square under the root, for pixels in -1 .. 1; errors below a hundredth stay quadratic."""
TEMPERATURE = 0.05
PROJECTION = 64


class Preview(nn.Module):
    """Linear decoder from a memory map with patches of `stem` x `stem` pixels to a frame."""

    def __init__(self, channels: int, colours: int, stem: int) -> None:
        super().__init__()
        self.stem = stem
        self.picture = nn.Sequential(nn.Conv2d(channels, colours * stem**2, 1), nn.PixelShuffle(stem))

    def forward(self, laid: Tensor) -> Tensor:
        """Decode (N, channels, H / stem, W / stem) to (N, C, H, W)."""
        return self.picture(laid)

    def error(self, laid: Tensor, frames: Tensor) -> Tensor:
        """Return the mean over patches of the root mean square error of frames (N, C, H, W): (N,)."""
        square = (self(laid) - frames).square().mean(1, keepdim=True)  # over colours
        return (F.avg_pool2d(square, self.stem) + SMALLEST).sqrt().mean((1, 2, 3))


class Contrast(nn.Module):
    """Contrastive choice of the next frame (van den Oord et al. 2018), by cosine similarity over a temperature."""

    def __init__(self, dim: int, encoded: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(dim, PROJECTION), nn.Linear(encoded, PROJECTION)

    def forward(self, h: Tensor, encoded: Tensor) -> Tensor:
        """Return logits (N, U) of memories (N, D) for encoded frames (U, E)."""
        return F.normalize(self.query(h), dim=-1) @ F.normalize(self.key(encoded), dim=-1).mT / TEMPERATURE

    def error(self, h: Tensor, encoded: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy (N,) in nats; target: index of the next frame, int64 (N,)."""
        return F.cross_entropy(self(h, encoded), target, reduction="none")


def unique_frames(frames: Tensor) -> tuple[Tensor, Tensor]:
    """Return the unique frames (U, ...) and each frame's index among them, int64 (N,)."""
    rows, index = torch.unique(frames.flatten(1), dim=0, return_inverse=True)
    return rows.unflatten(1, frames.shape[1:]), index


def to_signed(frames: Tensor) -> Tensor:
    """Convert uint8 (..., H, W, C) to (..., C, H, W) in -1 .. 1."""
    return frames.movedim(-1, -3).float() / LEVELS * 2 - 1


def novelty(batch: FrameBatch, length: int) -> Tensor:
    """Return each next frame's distance to the nearest of the `length` frames before it: (B, T)."""
    after, before = (to_signed(frames).flatten(2) for frames in (batch.next_obs, batch.obs))
    steps = torch.arange(before.shape[1], device=before.device)
    age = steps[:, None] - steps
    episode = batch.first.long().cumsum(1)
    visible = (age >= 0) & (age < length) & (episode[:, :, None] == episode[:, None])
    return torch.cdist(after, before).masked_fill(~visible, torch.inf).amin(2)  # age 0 is always visible
