"""Auxiliary memory losses (ours): linear next-frame reconstruction and contrastive next-frame choice.

Both are ours. A squared error of pixels hardly counts what is small, and what has to be remembered often is: the two
cues of a maze differ by a ten-thousandth of it. So the picture's error is a root, place by place; and which of the
frames at hand comes next is asked besides, where two that differ in a few pixels are as different as any.

Shape suffixes: N steps, U different frames, C channels, H/W frame, D memory, K compared, E encoded frame.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.pixel.system import FrameBatch

LEVELS = 255
SMALLEST = 1e-4
"""Added to a place's mean square under the root, of pixels in -1 .. 1: below a hundredth off, it is a square again."""
TEMPERATURE = 0.05
COMPARED = 64


class Preview(nn.Module):
    """A frame out of a memory laid out over places of `stem` x `stem` pixels, each place of its own channels alone."""

    def __init__(self, channels: int, colours: int, stem: int) -> None:
        super().__init__()
        self.stem = stem
        self.picture = nn.Sequential(nn.Conv2d(channels, colours * stem**2, 1), nn.PixelShuffle(stem))

    def forward(self, laid: Tensor) -> Tensor:
        """(N, C, H, W) of (N, channels, H / stem, W / stem)."""
        return self.picture(laid)

    def error(self, laid: Tensor, frames: Tensor) -> Tensor:
        """(N,): the mean over places of the root of the mean square error of frames (N, C, H, W)."""
        square = (self(laid) - frames).square().mean(1, keepdim=True)
        return (F.avg_pool2d(square, self.stem) + SMALLEST).sqrt().mean((1, 2, 3))


class Contrast(nn.Module):
    """Which of several frames comes next (van den Oord et al. 2018), by cosines over a temperature."""

    def __init__(self, dim: int, encoded: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(dim, COMPARED), nn.Linear(encoded, COMPARED)

    def forward(self, h: Tensor, encoded: Tensor) -> Tensor:
        """Logits (N, U) of memories (N, D) for encoded frames (U, E)."""
        return F.normalize(self.query(h), dim=-1) @ F.normalize(self.key(encoded), dim=-1).mT / TEMPERATURE

    def error(self, h: Tensor, encoded: Tensor, which: Tensor) -> Tensor:
        """(N,): nats by which frame int64 (N,) was not expected."""
        return F.cross_entropy(self(h, encoded), which, reduction="none")


def different(frames: Tensor) -> tuple[Tensor, Tensor]:
    """Frames (N, ...) without repetition (U, ...), and which of them each is, int64 (N,)."""
    rows, which = torch.unique(frames.flatten(1), dim=0, return_inverse=True)
    return rows.unflatten(1, frames.shape[1:]), which


def to_signed(frames: Tensor) -> Tensor:
    """uint8 (..., H, W, C) as (..., C, H, W) in -1 .. 1."""
    return frames.movedim(-1, -3).float() / LEVELS * 2 - 1


def novelty(batch: FrameBatch, length: int) -> Tensor:
    """(B, T): how far the frame that each step leads to is from the nearest of the `length` frames before it."""
    after, before = (to_signed(frames).flatten(2) for frames in (batch.next_obs, batch.obs))
    steps = torch.arange(before.shape[1], device=before.device)
    age = steps[:, None] - steps
    episode = batch.first.long().cumsum(1)
    seen = (age >= 0) & (age < length) & (episode[:, :, None] == episode[:, None])
    return torch.cdist(after, before).masked_fill(~seen, torch.inf).amin(2)
