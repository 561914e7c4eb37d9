"""Keys and values of a decoding batch, written in place.

`CoreState` keeps every older version valid, so that worlds can fork; it pays with a copy of everything at every
token. A decoding batch only ever moves on, and that copy is most of what a token of 16 rows costs.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from loopwm.core import CoreState

SPARE_COLUMNS = 128
"""Columns reserved beyond those in use, so that one allocation serves that many tokens."""


class BatchCache(CoreState):
    """A CoreState whose buffers have spare columns. Writing changes its tensors: forks of it are not independent."""

    @property
    def columns(self) -> int:
        return self.valid.shape[1]

    def update(self, key: Tensor, value: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Writes (B, H, L, E) keys and values into the newest L columns and returns all columns of the slot."""
        new = slice(self.columns - key.shape[2], self.columns)
        for buffers, fresh in ((self.keys, key), (self.values, value)):
            buffers[slot] = self._with_room(buffers.get(slot), fresh)
            buffers[slot][:, :, new] = fresh
        return self.keys[slot][:, :, : self.columns], self.values[slot][:, :, : self.columns]

    def select(self, rows: Tensor) -> Self:
        """An independent cache of the given rows (int64 (n,), repeats allowed)."""
        return self._map(lambda x: x[rows], self.valid[rows], self.next_position[rows])  # type: ignore[return-value]

    def join(self, other: BatchCache) -> BatchCache:
        """One batch of both, first these rows, then the other's; the shorter one is padded on the left."""
        columns = max(self.columns, other.columns)
        joined = BatchCache(0, self.valid.device)
        joined.valid = torch.cat([_pad_left(x.valid, columns) for x in (self, other)])
        joined.next_position = torch.cat((self.next_position, other.next_position))
        for slot in self.keys:
            joined.keys[slot] = _stack(self.keys[slot][:, :, : self.columns], other.keys[slot][:, :, : other.columns])
            joined.values[slot] = _stack(
                self.values[slot][:, :, : self.columns], other.values[slot][:, :, : other.columns]
            )
        return joined

    def _with_room(self, buffer: Tensor | None, fresh: Tensor) -> Tensor:
        """The buffer itself, or a longer copy of it, with room for all columns: (B, H, at least columns, E)."""
        if buffer is not None and buffer.shape[2] >= self.columns:
            return buffer
        batch, heads, _, width = fresh.shape
        grown = fresh.new_empty(batch, heads, self.columns + SPARE_COLUMNS, width)
        if buffer is not None:
            grown[:, :, : buffer.shape[2]] = buffer
        return grown


def _pad_left(valid: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(valid, (columns - valid.shape[1], 0))


def _stack(first: Tensor, second: Tensor) -> Tensor:
    """(B1, H, S1, E) and (B2, H, S2, E) -> (B1 + B2, H, max + spare, E), aligned at their last columns.

    Padding is zero, not uninitialised: its attention weight is zero, but zero times NaN is NaN.
    """
    columns = max(first.shape[2], second.shape[2])
    size = (len(first) + len(second), first.shape[1], columns + SPARE_COLUMNS, first.shape[3])
    out = first.new_zeros(size)
    out[: len(first), :, columns - first.shape[2] : columns] = first
    out[len(first) :, :, columns - second.shape[2] : columns] = second
    return out
