"""Nearest-neighbour patch tokenizer (TWISTED, section 2.4): the codes are observed patches.

Distances are squared L2 over pixels in [0, 1]. They are computed on bytes as integers, in units of 1/255 squared, so
that ties and thresholds are the same on every device.

Shapes: N patches, S codes, P bytes of a patch; H, W, C frame; L = rows * columns patches of a frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 8192
"""Patches per distance matrix: 128 MiB at 4,096 codes."""


class PatchTokenizer:
    """Tokenizer of frames. Codes live on the device of the last frames or tokens."""

    def __init__(
        self, frame_shape: tuple[int, int, int], patch: tuple[int, int], capacity: int = 4096, threshold: float = 0.75
    ) -> None:
        """Create an empty codebook for patches (h, w) of frames (H, W, C). Raises ValueError naming a value at fault.

        capacity: maximum number of codes
        threshold: squared distance beyond which a patch becomes a code
        """
        height, width, channels = frame_shape
        if min(*frame_shape, *patch) < 1 or height % patch[0] or width % patch[1]:
            raise ValueError(f"patch: must divide frames of {height} x {width}, got {patch[0]} x {patch[1]}")
        if capacity < 1:
            raise ValueError(f"capacity: must be at least 1, got {capacity}")
        if not (math.isfinite(threshold) and threshold >= 0):
            raise ValueError(f"threshold: must be a squared distance, got {threshold}")
        self.frame_shape, self.patch = (height, width, channels), (patch[0], patch[1])
        self.grid = height // patch[0], width // patch[1]
        """Rows and columns: token i is at row i // columns, column i % columns."""
        self.tokens_per_frame = math.prod(self.grid)
        self.capacity, self.threshold = capacity, float(threshold)
        self.codes = torch.empty(0, patch[0] * patch[1] * channels, dtype=torch.uint8)
        """Codes, uint8 (S, P)."""

    @property
    def size(self) -> int:
        """Number of codes; tokens are below it."""
        return len(self.codes)

    def grow(self, frames: Tensor) -> int:
        """Add patches of frames uint8 (..., H, W, C) that are further than the threshold from every code, in order.

        Each patch is compared with all codes added before it. Returns the patches left without a code because the
        codebook was full. Raises ValueError for frames of another shape.
        """
        self._check_frames(frames)
        refused = 0
        for patches in self._blocks(frames):
            distinct, inverse = first_occurrences(patches)
            count = torch.bincount(inverse, minlength=len(distinct))
            far = self._far(distinct, self.codes)
            distinct, count = distinct[far], count[far]
            while len(distinct) and self.size < self.capacity:
                code = distinct[:1]  # the next far patch; those near it are done
                self.codes = torch.cat([self.codes, code])
                far = self._far(distinct, code)
                distinct, count = distinct[far], count[far]
            refused += int(count.sum())
        return refused

    def encode(self, frames: Tensor) -> Tensor:
        """Return the nearest codes of frames uint8 (..., H, W, C), the lowest of ties: int64 (..., L).

        Raises ValueError for frames of another shape, or if the codebook is empty.
        """
        self._check_frames(frames)
        if not self.size:
            raise ValueError("tokenizer: codebook is empty; call grow first")
        tokens = [torch.empty(0, dtype=torch.int64, device=frames.device)]
        for patches in self._blocks(frames):
            distinct, inverse = first_occurrences(patches)
            tokens.append(squared_distances(distinct, self.codes).argmin(-1)[inverse])
        return torch.cat(tokens).view(*frames.shape[:-3], self.tokens_per_frame)

    def decode(self, tokens: Tensor) -> Tensor:
        """Return the frames uint8 (..., H, W, C) of tokens int64 (..., L).

        Raises ValueError for a wrong number of tokens, or a token without a code.
        """
        if tokens.shape[-1:] != (self.tokens_per_frame,):
            raise ValueError(f"tokens: shape must end in {self.tokens_per_frame}, got {tuple(tokens.shape)}")
        if tokens.numel() and not (int(tokens.min()) >= 0 and int(tokens.max()) < self.size):
            raise ValueError(f"tokens: must be below {self.size} (codes), got {int(tokens.min())}..{int(tokens.max())}")
        self.codes = self.codes.to(tokens.device)
        (rows, columns), (h, w), channels = self.grid, self.patch, self.frame_shape[2]
        patches = self.codes[tokens].view(-1, rows, columns, h, w, channels)
        return patches.transpose(2, 3).reshape(*tokens.shape[:-1], *self.frame_shape)

    def take_codes(self, codes: Tensor) -> None:
        """Replace the codes by those of another tokenizer. Raises ValueError if they belong to other settings."""
        if codes.dtype != torch.uint8 or codes.shape[1:] != self.codes.shape[1:] or len(codes) > self.capacity:
            raise ValueError(f"codes: must fit the tokenizer's settings, got {codes.dtype} {tuple(codes.shape)}")
        self.codes = codes

    def _check_frames(self, frames: Tensor) -> None:
        if frames.dtype != torch.uint8 or tuple(frames.shape[-3:]) != self.frame_shape:
            raise ValueError(
                f"frames: must be uint8 ending in {self.frame_shape}, got {frames.dtype} {tuple(frames.shape)}"
            )

    def _blocks(self, frames: Tensor) -> Iterator[Tensor]:
        """Yield the patches (N, P) of whole frames in order, some frames at a time."""
        self.codes = self.codes.to(frames.device)
        (rows, columns), (h, w), channels = self.grid, self.patch, self.frame_shape[2]
        cut = frames.reshape(-1, rows, h, columns, w, channels)
        for block in cut.split(max(1, BLOCK // self.tokens_per_frame)):
            if len(block):
                yield block.transpose(2, 3).reshape(-1, h * w * channels)

    def _far(self, patches: Tensor, codes: Tensor) -> Tensor:
        """Return True for patches (N, P) further than the threshold from all codes (S, P): bool (N,)."""
        if not len(codes):
            return torch.ones(len(patches), dtype=torch.bool, device=patches.device)
        return squared_distances(patches, codes).amin(-1) > self.threshold * 255**2


def squared_distances(patches: Tensor, codes: Tensor) -> Tensor:
    """Return squared L2 distances of bytes (N, P) and (S, P) as exact integers: (N, S) float.

    Values are centred to eight bits: even products in TF32 are exact, and sums fit float32 up to 258 bytes a patch.
    Larger patches use float64.
    """
    dtype = torch.float32 if patches.shape[-1] * 255**2 < 2**24 else torch.float64  # exact up to 2^24
    x, c = patches.to(dtype) - 128, codes.to(dtype) - 128
    return (x.square().sum(-1)[:, None] + c.square().sum(-1)).addmm_(x, c.T, alpha=-2)


def first_occurrences(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct rows (M, P) of uint8 (N, P) in order of first occurrence, and each row's index (N,)."""
    words = torch.nn.functional.pad(patches, (0, 8 - patches.shape[-1] % 8)).view(torch.int64)  # whole 64-bit words
    first, inverse = _first_of_equal((words * _multipliers(words)).sum(-1))
    if not torch.equal(words, words[first[inverse]]):  # hash collision
        first, inverse = _first_of_equal(torch.unique(words, dim=0, return_inverse=True)[1])
    return patches[first], inverse


def _multipliers(words: Tensor) -> Tensor:
    """Return odd multipliers of a 64-bit hash of rows: sorting integers is far cheaper than sorting rows."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**63), 2**63 - 1, (words.shape[-1],), generator=generator)
    return (numbers | 1).to(words.device)  # odd: invertible modulo 2^64


def _first_of_equal(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of each key's first occurrence, in order, and each key's number (N,) in that order."""
    unique, inverse = torch.unique(keys, return_inverse=True)
    places = torch.arange(len(keys), device=keys.device)
    first = torch.full_like(unique, len(keys)).scatter_reduce(0, inverse, places, "amin")
    order = first.argsort()
    return first[order], order.argsort()[inverse]
