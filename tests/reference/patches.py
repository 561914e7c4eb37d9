"""A codebook of patches, grown one patch at a time with whole numbers. Shares no code with the package."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def patches_of(frame: Bytes, patch: tuple[int, int]) -> list[Bytes]:
    """The patches of a frame (H, W, C), row by row."""
    height, width = patch
    return [
        frame[y : y + height, x : x + width]
        for y in range(0, frame.shape[0], height)
        for x in range(0, frame.shape[1], width)
    ]


def squared_distance(one: Bytes, other: Bytes) -> int:
    """In units of 1/255 squared."""
    return int(((one.astype(np.int64) - other.astype(np.int64)) ** 2).sum())


@dataclass
class Codebook:
    patch: tuple[int, int]
    capacity: int
    threshold: float
    codes: list[Bytes] = field(default_factory=list)
    refused: int = 0

    def grow(self, frames: Bytes) -> None:
        for frame in frames:
            for patch in patches_of(frame, self.patch):
                distances = [squared_distance(patch, code) for code in self.codes]
                if distances and min(distances) <= self.threshold * 65025:
                    continue
                if len(self.codes) < self.capacity:
                    self.codes.append(patch)
                else:
                    self.refused += 1

    def encode(self, frame: Bytes) -> list[int]:
        tokens = []
        for patch in patches_of(frame, self.patch):
            distances = [squared_distance(patch, code) for code in self.codes]
            tokens.append(distances.index(min(distances)))
        return tokens
