"""Memory for keys and values: buffers that several states share, and rows and columns of tensors (B, H, S, E)."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

SLACK = 64
"""Columns allocated beyond what is needed, so that decoding does not copy a cache for every token."""

_claiming = threading.Lock()
"""Forks of one state may go on in several threads."""


class _Allocated:
    """Bytes of all buffers that are alive. The lock lets its own thread in again: a garbage collection may end a buffer
    while another one is counted."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.RLock()

    def add(self, count: int) -> None:
        with self._lock:
            self.total += count


_allocated = _Allocated()


def allocated_bytes() -> int:
    """Memory of all keys and values of this process, with the room that is kept for more; what forks share counts
    once."""
    return _allocated.total


class Buffer:
    """Keys and values (rows, H, columns, E) that forks share, with room for more of both.

    rows: that are in use. used: columns that one of the forks has written.
    """

    def __init__(self, key: Tensor, value: Tensor, used: int, rows: int | None = None) -> None:
        self.key, self.value, self.used = key, value, used
        self.rows = len(key) if rows is None else rows
        self._bytes = (key.numel() + value.numel()) * key.element_size()
        _allocated.add(self._bytes)

    def __del__(self) -> None:
        _allocated.add(-self._bytes)

    def claim(self, start: int, end: int) -> bool:
        """Whether who sees the columns before `start` may write those up to `end`: the first who asks, if there is
        room."""
        with _claiming:
            granted = self.used == start and end <= self.key.shape[2]
            if granted:
                self.used = end
        return granted

    def columns(self, length: int) -> tuple[Tensor, Tensor]:
        return self.key[: self.rows, :, :length], self.value[: self.rows, :, :length]

    def nbytes(self, length: int) -> int:
        """Of these columns."""
        _, heads, _, width = self.key.shape
        return 2 * self.rows * heads * length * width * self.key.element_size()


def room_like(columns: Tensor, rows: int, length: int) -> Tensor:
    """Memory for so many rows and columns like these (B, H, S, E), and SLACK columns more."""
    return columns.new_empty(rows, columns.shape[1], length + SLACK, columns.shape[3])


def with_room(columns: Tensor, length: int, rows: int) -> Tensor:
    """A copy of columns (B, H, S, E) with room for others."""
    buffer = room_like(columns, rows, length)
    buffer[: len(columns), :, : columns.shape[2]] = columns
    return buffer


def moved(buffer: Tensor, rows: Sequence[int]) -> Tensor:
    """The buffer with these rows at its beginning."""
    for place, row in enumerate(rows):
        if place != row:
            buffer[place] = buffer[row]
    return buffer


def place_rows(buffer: Tensor, parts: Sequence[Tensor], row: int, columns: int) -> Tensor:
    """Writes parts (B_i, H, S_i, E) into a buffer from this row on, each padded on the left to `columns`.

    The padding is zeros: masked columns must not hold NaN, which zero weights would not erase.
    """
    for part in parts:
        rows, start = buffer[row : row + len(part)], columns - part.shape[2]
        rows[:, :, :start] = 0
        rows[:, :, start:columns] = part
        row += len(part)
    return buffer
