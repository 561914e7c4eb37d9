"""Nearest-neighbour patch tokenizer (TWISTED, section 2.4): the codes are patches that were seen.

Distances are squared L2 over pixels in [0, 1]. They are computed on bytes as whole numbers, in units of 1/255 squared,
so that ties and thresholds come out the same on every device.

N patches, S codes, P bytes of a patch; H, W, C frame; L = rows * columns patches of a frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 8192
"""Patches whose distances to all codes are held at once: 128 MiB at 4,096 codes."""


@dataclass(frozen=True)
class Growth:
    """What a call of `grow` did: codes added, and patches left without one because the codebook was full."""

    added: int
    refused: int


class PatchTokenizer:
    """Frames as patch tokens. Codes live on the device of the frames or tokens they were last used with."""

    def __init__(
        self, frame_shape: tuple[int, int, int], patch: tuple[int, int], capacity: int = 4096, threshold: float = 0.75
    ) -> None:
        """frame_shape: (H, W, C) in pixels; patch: (h, w). Raises ValueError naming what does not fit."""
        height, width, channels = frame_shape
        if min(*frame_shape, *patch) < 1 or height % patch[0] or width % patch[1]:
            raise ValueError(f"patch: a frame of {height} x {width} is not divisible into {patch[0]} x {patch[1]}")
        if capacity < 1:
            raise ValueError(f"capacity: {capacity} is less than 1")
        if not (math.isfinite(threshold) and threshold >= 0):
            raise ValueError(f"threshold: {threshold} is not a squared distance")
        self.frame_shape, self.patch = (height, width, channels), (patch[0], patch[1])
        self.capacity, self.threshold = capacity, float(threshold)
        self._codes = torch.empty(0, patch[0] * patch[1] * channels, dtype=torch.uint8)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns: token i lies at row i // columns, column i % columns."""
        return self.frame_shape[0] // self.patch[0], self.frame_shape[1] // self.patch[1]

    @property
    def tokens_per_frame(self) -> int:
        return math.prod(self.grid)

    @property
    def size(self) -> int:
        """Codes so far; tokens are below it."""
        return len(self._codes)

    @property
    def full(self) -> bool:
        return self.size >= self.capacity

    def grow(self, frames: Tensor) -> Growth:
        """Adds patches of frames uint8 (..., H, W, C), in order, that are further than the threshold from every code.

        Each patch is compared with all codes added before it. Raises ValueError for frames of another shape.
        """
        self._check_frames(frames)
        before, refused = self.size, 0
        for patches in self._blocks(frames):
            distinct, inverse = first_occurrences(patches)
            count = torch.bincount(inverse, minlength=len(distinct))
            far = self._far(distinct, self._codes)
            distinct, count = distinct[far], count[far]
            while len(distinct) and not self.full:
                code = distinct[:1]
                self._codes = torch.cat([self._codes, code])
                far = self._far(distinct, code)
                distinct, count = distinct[far], count[far]
            refused += int(count.sum())
        return Growth(self.size - before, refused)

    def encode(self, frames: Tensor) -> Tensor:
        """Nearest codes of frames uint8 (..., H, W, C), the lowest of equally near ones: int64 (..., L).

        Raises ValueError for frames of another shape, or while there is no code.
        """
        self._check_frames(frames)
        if not self.size:
            raise ValueError("tokenizer: its codebook is empty; grow it first")
        tokens = [torch.empty(0, dtype=torch.int64, device=frames.device)]
        for patches in self._blocks(frames):
            distinct, inverse = first_occurrences(patches)
            tokens.append(squared_distances(distinct, self._codes).argmin(-1)[inverse])
        return torch.cat(tokens).view(*frames.shape[:-3], self.tokens_per_frame)

    def decode(self, tokens: Tensor) -> Tensor:
        """Frames uint8 (..., H, W, C) of tokens int64 (..., L).

        Raises ValueError for another number of tokens, or a token that has no code.
        """
        if tokens.shape[-1:] != (self.tokens_per_frame,):
            raise ValueError(f"tokens: shape {tuple(tokens.shape)} does not end in {self.tokens_per_frame}")
        if tokens.numel() and not (int(tokens.min()) >= 0 and int(tokens.max()) < self.size):
            raise ValueError(f"tokens: {int(tokens.min())}..{int(tokens.max())} are not all among {self.size} codes")
        self._codes = self._codes.to(tokens.device)
        (rows, columns), (h, w), channels = self.grid, self.patch, self.frame_shape[2]
        patches = self._codes[tokens].view(-1, rows, columns, h, w, channels)
        return patches.transpose(2, 3).reshape(*tokens.shape[:-1], *self.frame_shape)

    @property
    def codes(self) -> Tensor:
        """uint8 (S, P)."""
        return self._codes

    def take_codes(self, codes: Tensor) -> None:
        """Goes on with the codes of another tokenizer. Raises ValueError for those of other settings."""
        if codes.dtype != torch.uint8 or codes.shape[1:] != self._codes.shape[1:] or len(codes) > self.capacity:
            raise ValueError(f"codes: {codes.dtype} {tuple(codes.shape)} are no codes of these settings")
        self._codes = codes

    def _check_frames(self, frames: Tensor) -> None:
        if frames.dtype != torch.uint8 or tuple(frames.shape[-3:]) != self.frame_shape:
            raise ValueError(
                f"frames: {frames.dtype} {tuple(frames.shape)}, expected uint8 ending in {self.frame_shape}"
            )

    def _blocks(self, frames: Tensor) -> Iterator[Tensor]:
        """The patches (N, P) of whole frames in order, some frames at a time."""
        self._codes = self._codes.to(frames.device)
        (rows, columns), (h, w), channels = self.grid, self.patch, self.frame_shape[2]
        cut = frames.reshape(-1, rows, h, columns, w, channels)
        for block in cut.split(max(1, BLOCK // self.tokens_per_frame)):
            if len(block):
                yield block.transpose(2, 3).reshape(-1, h * w * channels)

    def _far(self, patches: Tensor, codes: Tensor) -> Tensor:
        """Which patches (N, P) are further than the threshold from all codes (S, P): bool (N,)."""
        if not len(codes):
            return torch.ones(len(patches), dtype=torch.bool, device=patches.device)
        return squared_distances(patches, codes).amin(-1) > self.threshold * 255**2


def squared_distances(patches: Tensor, codes: Tensor) -> Tensor:
    """Squared L2 distances of bytes (N, P) and (S, P), exact whole numbers: (N, S) float.

    Values are centred, so that they have eight bits: even products in TF32 are exact, and sums fit float32 up to 258
    bytes a patch. Larger patches take float64.
    """
    dtype = torch.float32 if patches.shape[-1] * 255**2 < 2**24 else torch.float64
    x, c = patches.to(dtype) - 128, codes.to(dtype) - 128
    return (x.square().sum(-1)[:, None] + c.square().sum(-1)).addmm_(x, c.T, alpha=-2)


def first_occurrences(patches: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows of uint8 (N, P) in order of first occurrence (M, P), and the place of each row in them (N,)."""
    words = torch.nn.functional.pad(patches, (0, 8 - patches.shape[-1] % 8)).view(torch.int64)
    first, inverse = _first_of_equal((words * _multipliers(words)).sum(-1))
    if not torch.equal(words, words[first[inverse]]):  # different rows of the same hash
        first, inverse = _first_of_equal(torch.unique(words, dim=0, return_inverse=True)[1])
    return patches[first], inverse


def _multipliers(words: Tensor) -> Tensor:
    """Odd numbers whose sum of products, wrapped to 64 bits, tells rows apart: a sort of numbers is far cheaper."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (words.shape[-1],), generator=generator)
    return (drawn | 1).to(words.device)


def _first_of_equal(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the first of each key, in order, and for each key (N,) its number in that order."""
    unique, inverse = torch.unique(keys, return_inverse=True)
    places = torch.arange(len(keys), device=keys.device)
    first = torch.full_like(unique, len(keys)).scatter_reduce(0, inverse, places, "amin")
    order = first.argsort()
    return first[order], order.argsort()[inverse]
