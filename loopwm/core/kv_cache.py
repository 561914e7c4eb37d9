"""KV caches: keys and values per attention slot, of a batch, of rows behind one prefix, and of a ragged batch.

Columns are token positions of a padded batch. Padding stays in its column and is masked, so rows of different length
share a batch without moving keys. Shapes of keys and values: (B, H, S, E), rows, heads, columns, width of a head.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from loopwm.core.block import Attend

SLACK = 64
"""Columns allocated beyond those needed, so that decoding copies a cache every 64 tokens and not at every one."""

_claim_lock = threading.Lock()  # forks of one cache may append in several threads
_count_lock = threading.RLock()  # reentrant: a garbage collection inside it may run `_Buffer.__del__`
_allocated_bytes = 0


def allocated_bytes() -> int:
    """Return the bytes of all keys and values in this process, free room included; shared buffers count once."""
    return _allocated_bytes


def _count_bytes(count: int) -> None:
    global _allocated_bytes
    with _count_lock:
        _allocated_bytes += count


class _Buffer:
    """Keys and values that forks share, allocated for at least `rows` rows and `used` columns."""

    def __init__(self, key: Tensor, value: Tensor, used: int, rows: int) -> None:
        self.key, self.value, self.used, self.rows = key, value, used, rows
        self._bytes = (key.numel() + value.numel()) * key.element_size()
        _count_bytes(self._bytes)

    def __del__(self) -> None:
        _count_bytes(-self._bytes)

    def claim(self, start: int, end: int) -> bool:
        """Reserve columns start .. end for a fork; False if another fork wrote past `start` or room is short."""
        with _claim_lock:
            granted = self.used == start and end <= self.key.shape[2]
            if granted:
                self.used = end
        return granted

    def columns(self, length: int) -> tuple[Tensor, Tensor]:
        return self.key[: self.rows, :, :length], self.value[: self.rows, :, :length]


class KVCache:
    """Keys and values per slot, a mask of the real columns, and each row's next position.

    Forks share buffers. The first fork to append writes into the free columns behind the shared ones; every other one
    copies before its first write. Written columns never change, so a fork is cheap and independent.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self._buffers: dict[int, _Buffer] = {}
        self._lengths: dict[int, int] = {}
        self._owned: set[int] = set()  # slots whose buffer no fork shares yet: rows may be moved in place
        self._reserved = 0
        self.valid = torch.zeros(batch, 0, dtype=torch.bool, device=device)
        self.next_position = torch.zeros(batch, dtype=torch.long, device=device)

    @property
    def length(self) -> int:
        """Columns of a row, padding and shared prefix included."""
        return self.valid.shape[1]

    def extend(self, valid_BL: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add L columns to the mask, of which `valid_BL` (B, L) bool are real.

        Returns their positions (B, L) and the attention mask (B, 1, L, S + L), True where a query attends: real columns
        up to itself. None where plain causal attention is the same: first columns, padded at their end.
        """
        steps, past = valid_BL.long().cumsum(1), self.valid
        positions = (self.next_position[:, None] + steps - 1).clamp(min=0)
        self.valid, self.next_position = torch.cat((past, valid_BL), dim=1), self.next_position + steps[:, -1]
        if past.shape[1] == 0 and bool((valid_BL[:, :-1] >= valid_BL[:, 1:]).all()):
            return positions, None
        ones = torch.ones(2 * (valid_BL.shape[1],), dtype=torch.bool, device=valid_BL.device)
        # A padding column attends to itself: a softmax over no columns would be NaN.
        new = ones.tril() & valid_BL[:, None, :] | ones.tril() & ones.triu()
        return positions, torch.cat((past[:, None, :].expand(-1, len(ones), -1), new), dim=2)[:, None]

    def reserve(self, columns: int) -> None:
        """Allocate room for `columns` columns in all at the next allocation of each slot."""
        self._reserved = columns

    def update(self, key: Tensor, value: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Append (B, H, L, E) keys and values to a slot and return all of the slot's.

        Gradients flow into the returned tensors; without gradients the cache is written in place.
        """
        start = self._lengths.get(slot, 0)
        end = start + key.shape[2]
        if slot in self._buffers and not key.requires_grad:
            buffer = self._buffers[slot]
            if not buffer.claim(start, end):
                length = max(end, self._reserved)
                old_key, old_value = (_with_room(old, length, len(buffer.key)) for old in buffer.columns(start))
                buffer = self._buffers[slot] = _Buffer(old_key, old_value, end, buffer.rows)
                self._owned.add(slot)
            buffer.key[: buffer.rows, :, start:end], buffer.value[: buffer.rows, :, start:end] = key, value
        else:
            if slot in self._buffers:  # autograd refuses a tensor that changes in place after it was saved
                key, value = (torch.cat(pair, 2) for pair in zip(self.columns(slot), (key, value), strict=True))
            elif end < self._reserved and not key.requires_grad:
                key, value = (_with_room(new, self._reserved, len(new)) for new in (key, value))
            self._buffers[slot] = _Buffer(key, value, end, len(key))
        self._lengths[slot] = end
        return self.columns(slot)

    def columns(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a used slot, (B, H, S, E) each."""
        return self._buffers[slot].columns(self._lengths[slot])

    def finish(self, loop_slots: Sequence[Sequence[int]], loops_B: Tensor, limit: int, columns: int) -> None:
        """Fill the slots of skipped loops after a pass over the newest `columns` columns of loops_B (B,) loops.

        A row's slots of loops that it did not run take its last keys and values, so that later columns may loop deeper:
        up to `limit`, or as deep as earlier columns reach. loop_slots: of each layer of the block, first loop first.
        """
        deepest, start = max(limit, self.depth(loop_slots)), self.valid.shape[1] - columns
        if int(loops_B.min()) >= deepest:
            return
        rows = torch.arange(len(loops_B), device=loops_B.device)
        for slots in loop_slots:
            ran = [slot for slot in slots[:deepest] if self._lengths.get(slot, 0) > start]
            new = [tuple(side[:, :, start:] for side in self.columns(slot)) for slot in ran]
            last_key, last_value = (torch.stack(side)[loops_B - 1, rows] for side in zip(*new, strict=True))
            for loop, sides in enumerate(new):
                skipped = (loops_B <= loop)[:, None, None, None]
                for side, filling in zip(sides, (last_key, last_value), strict=True):
                    side.copy_(torch.where(skipped, filling, side))
            for slot in slots[len(ran) : deepest]:
                self.update(last_key, last_value, slot)

    def depth(self, loop_slots: Sequence[Sequence[int]]) -> int:
        """Return the loops of the deepest pass so far."""
        return sum(slot in self._lengths for slot in loop_slots[0])

    def _empty(self) -> KVCache:
        return KVCache(0, self.valid.device)

    def fork(self) -> KVCache:
        """Return an independent cache that shares the buffers."""
        other = self._empty()
        other._buffers, other._lengths, other._reserved = dict(self._buffers), dict(self._lengths), self._reserved
        other.valid, other.next_position = self.valid, self.next_position
        return other

    def select(self, rows: Tensor) -> KVCache:
        """Copy the given rows (int64 (n,), repeats allowed)."""
        return self._take(rows)

    def row(self, row: int) -> KVCache:
        """Copy one row without the padding of its own columns."""
        return self._take(torch.tensor([row], device=self.valid.device), self.valid[row])

    def _take(self, rows: Tensor, columns: Tensor | slice = slice(None)) -> KVCache:
        other = self.fork()
        other.valid, other.next_position = self.valid[rows][:, columns], self.next_position[rows]
        length = other.valid.shape[1]
        for slot in self._lengths:
            key, value = (_with_room(side[rows][:, :, columns], length, len(rows)) for side in self.columns(slot))
            other._buffers[slot], other._lengths[slot] = _Buffer(key, value, length, len(rows)), length
        other._owned = set(other._buffers)
        return other

    def move(self, rows: Sequence[int]) -> KVCache:
        """Keep `rows` only, in this order, and drop columns that are padding in all of them.

        In place if it can be: neither this cache nor a fork of it may be used any more. A row keeps its place or comes
        from beyond the last one kept, so that none is overwritten before it moves; else raises ValueError.
        """
        if any(place != row < len(rows) for place, row in enumerate(rows)):
            raise ValueError(f"rows: {rows} move onto one another")
        index = torch.tensor(rows, dtype=torch.long, device=self.valid.device)
        used = self.valid[index].any(0).nonzero()
        unused = int(used[0]) if len(used) else self.valid.shape[1]
        if self._owned != self._buffers.keys():
            return self._take(index, slice(unused, None))
        other = self.fork()
        other.valid, other.next_position = self.valid[index, unused:], self.next_position[index]
        for slot, buffer in self._buffers.items():
            for place, row in enumerate(rows):
                if place != row:
                    buffer.key[place], buffer.value[place] = buffer.key[row], buffer.value[row]
            length = self._lengths[slot] - unused
            sides = buffer.key[:, :, unused:], buffer.value[:, :, unused:]
            other._buffers[slot], other._lengths[slot] = _Buffer(*sides, length, len(rows)), length
        other._owned = set(other._buffers)
        return other

    def join(self, *others: KVCache, in_place: bool = False) -> KVCache:
        """Concatenate along the batch, these rows first; shorter rows are padded on the left. All use the same slots.

        in_place: append to this cache's buffers, or to a copy with room for twice the rows where they are too small.
        Neither this cache nor a fork of it may be used any more.
        """
        caches = (self, *others)
        columns, rows = max(cache.valid.shape[1] for cache in caches), sum(len(cache.valid) for cache in caches)
        slots = dict.fromkeys(slot for cache in caches for slot in cache._lengths)
        fits = in_place and self.valid.shape[1] == columns
        fits = fits and all(slot in self._owned and rows <= len(self._buffers[slot].key) for slot in slots)
        first, written = (len(self.valid), others) if fits else (0, caches)
        joined = self.fork()
        joined.valid = torch.cat([F.pad(cache.valid, (columns - cache.valid.shape[1], 0)) for cache in caches])
        joined.next_position = torch.cat([cache.next_position for cache in caches])
        for slot in slots:
            parts = list(zip(*(cache.columns(slot) for cache in written), strict=True))
            if fits:
                key, value = self._buffers[slot].key, self._buffers[slot].value
            else:
                key, value = (_room_like(part[0], 2 * rows if in_place else rows, columns) for part in parts)
            for side, part in zip((key, value), parts, strict=True):
                _place_rows(side, part, first, columns)
            joined._buffers[slot], joined._lengths[slot] = _Buffer(key, value, columns, rows), columns
        joined._owned = set(joined._buffers)
        return joined

    def crop(self, columns: int) -> KVCache:
        """Fork without the last `columns` columns. Raises ValueError if there are fewer."""
        remaining = self.valid.shape[1] - columns
        if columns < 0 or remaining < 0:
            raise ValueError(f"cannot crop {columns} of {self.valid.shape[1]} columns")
        other = self.fork()
        other._lengths = {slot: length - columns for slot, length in self._lengths.items()}
        other.valid = self.valid[:, :remaining]
        other.next_position = self.next_position - self.valid[:, remaining:].sum(1)
        return other

    def tail(self, columns: int) -> KVCache:
        """Fork with the last `columns` columns only, at the same positions. Raises ValueError if there are fewer."""
        dropped = self.valid.shape[1] - columns
        if columns < 0 or dropped < 0:
            raise ValueError(f"cannot keep {columns} of {self.valid.shape[1]} columns")
        if not dropped:
            return self.fork()  # keeps the free room behind the columns, so the next append need not copy
        other = self.fork()
        for slot, length in self._lengths.items():
            key, value = (side[:, :, dropped:] for side in self.columns(slot))  # views: not owned
            other._buffers[slot] = _Buffer(key, value, length - dropped, len(key))
            other._lengths[slot] = length - dropped
        other.valid = self.valid[:, dropped:]
        return other

    def whole(self) -> KVCache:
        """Return the same rows without a shared prefix."""
        return self

    def nbytes(self) -> int:
        """Return the bytes of the keys and values in use."""
        return sum(side.numel() * side.element_size() for slot in self._lengths for side in self.columns(slot))


class SharedPrefixCache(KVCache):
    """Rows that continue one and the same prefix, whose columns are stored once.

    `valid`, `columns`, `crop` and the result of `update` cover the rows' own columns; attention must also read the
    prefix (`prefix_attention`).
    """

    def __init__(self, prefix: KVCache, batch: int) -> None:
        """Start `batch` rows behind `prefix`, one row without padding that must not change any more."""
        if len(prefix.valid) != 1 or not prefix.valid.all():
            raise ValueError(f"prefix: must be one row without padding, got {tuple(prefix.valid.shape)} columns")
        if type(prefix) is not KVCache:
            raise ValueError(f"prefix: must be a KVCache, got {type(prefix).__name__}")
        super().__init__(batch, prefix.valid.device)
        self.prefix = prefix
        self.next_position = prefix.next_position.expand(batch)

    def _empty(self) -> KVCache:
        return SharedPrefixCache(self.prefix, 0)

    @property
    def length(self) -> int:
        return self.prefix.length + super().length

    def columns(self, slot: int) -> tuple[Tensor, Tensor]:
        if slot in self._lengths:
            return super().columns(slot)
        key, value = (side[:, :, :0].expand(len(self.valid), -1, -1, -1) for side in self.prefix.columns(slot))
        return key, value

    def depth(self, loop_slots: Sequence[Sequence[int]]) -> int:
        return max(super().depth(loop_slots), self.prefix.depth(loop_slots))

    def join(self, *others: KVCache, in_place: bool = False) -> KVCache:
        if any(not isinstance(other, SharedPrefixCache) or other.prefix is not self.prefix for other in others):
            raise ValueError("others: must share one prefix with this cache")
        return super().join(*others, in_place=in_place)

    def whole(self) -> KVCache:
        """Copy the prefix for each row."""
        cache = self.prefix.select(torch.zeros(len(self.valid), dtype=torch.long, device=self.valid.device))
        for slot in self._lengths:
            cache.update(*self.columns(slot), slot)
        cache.valid = torch.cat((cache.valid, self.valid), dim=1)
        cache.next_position = self.next_position
        return cache

    def tail(self, columns: int) -> KVCache:
        return self.whole().tail(columns)

    def nbytes(self) -> int:
        return super().nbytes() + self.prefix.nbytes()


class RaggedBatch:
    """Caches of any length side by side in one pass, in place of one cache; rows are in the order of the caches.

    All but attention is computed for all rows together. Each cache attends to its own columns, so nothing is padded.
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        """Batch the rows of caches: at least one, all different."""
        self.caches = list(caches)
        self._rows = [len(cache.valid) for cache in caches]

    @property
    def length(self) -> int:
        return max(cache.length for cache in self.caches)

    def extend(self, valid_BL: Tensor) -> tuple[Tensor, Any]:
        """Extend each cache as `KVCache.extend`; the mask is a list, which only the attention of `attend` takes."""
        extended = [cache.extend(valid) for cache, valid in self._parts(valid_BL)]
        return torch.cat([positions for positions, _ in extended]), [mask for _, mask in extended]

    def attend(self, attention: Callable[[KVCache], Attend]) -> Attend:
        """Build the attention of all rows from that of each cache."""
        attends = [attention(cache) for cache in self.caches]

        def attend(slot: int, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
            parts = zip(attends, *(x.split(self._rows) for x in (q, k, v)), mask, strict=True)
            return torch.cat([one(slot, *part) for one, *part in parts])

        return attend

    def finish(self, loop_slots: Sequence[Sequence[int]], loops_B: Tensor, limit: int, columns: int) -> None:
        for cache, loops in self._parts(loops_B):
            cache.finish(loop_slots, loops, limit, columns)

    def _parts(self, rows: Tensor) -> Sequence[tuple[KVCache, Tensor]]:
        return list(zip(self.caches, rows.split(self._rows), strict=True))


def _room_like(columns: Tensor, rows: int, length: int) -> Tensor:
    """Allocate `rows` rows of `length` and SLACK columns like `columns` (B, H, S, E)."""
    return columns.new_empty(rows, columns.shape[1], length + SLACK, columns.shape[3])


def _with_room(columns: Tensor, length: int, rows: int) -> Tensor:
    buffer = _room_like(columns, rows, length)
    buffer[: len(columns), :, : columns.shape[2]] = columns
    return buffer


def _place_rows(buffer: Tensor, parts: Sequence[Tensor], row: int, columns: int) -> None:
    """Write parts (B_i, H, S_i, E) from row `row` on, each padded on the left to `columns`."""
    for part in parts:
        rows, start = buffer[row : row + len(part)], columns - part.shape[2]
        rows[:, :, :start] = 0  # not left empty: a masked NaN still spreads, since 0 * NaN is NaN
        rows[:, :, start:columns] = part
        row += len(part)
