"""KV caches: keys and values per attention slot, of a batch, of rows behind one prefix, and of a ragged batch.

Columns are token positions of a padded batch. Padding stays in its column and is masked, so rows of different length
share a batch without moving keys. A slot's keys and values are one tensor (2, B, H, S, E): rows, heads, columns, width.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from loopwm.core.block import Attend

SLACK = 64
"""Columns allocated beyond those needed, so that decoding copies a cache every 64 tokens and not at every one."""

_lock = threading.RLock()  # reentrant: a garbage collection inside it may run `_Buffer.__del__`


def allocated_bytes() -> int:
    """Return the bytes of all keys and values in this process, free room included; shared buffers count once."""
    return _Buffer.allocated


class _Buffer:
    """Keys and values that forks share: (2, B, H, S, E), of which `rows` rows and `used` columns are in use."""

    allocated = 0

    def __init__(self, data: Tensor, used: int, rows: int) -> None:
        self.data, self.used, self.rows = data, used, rows
        with _lock:
            _Buffer.allocated += data.untyped_storage().nbytes()  # all that a view keeps

    def __del__(self, lock: threading.RLock = _lock) -> None:  # the module's names are gone as the interpreter ends
        with lock:
            type(self).allocated -= self.data.untyped_storage().nbytes()

    def claim(self, start: int, end: int) -> bool:
        """Reserve columns start .. end for a fork; False if another fork wrote past `start` or room is short."""
        with _lock:  # forks of one cache may append in several threads
            if granted := self.used == start and end <= self.data.shape[3]:
                self.used = end
        return granted


class KVCache:
    """Keys and values per slot, a mask of the real columns, and each row's next position.

    Forks share buffers. The first fork to append writes into the free columns behind the shared ones; every other one
    copies before its first write. Written columns never change, so a fork is cheap and independent.

    prefix: one row that all rows continue, stored once; None without. `valid`, `columns`, `crop` and the result of
        `update` cover the rows' own columns; attention must also read the prefix (`prefix_attention`).
    reserved: columns to make room for at the next allocation of each slot.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.prefix: KVCache | None = None
        self._buffers: dict[int, _Buffer] = {}
        self._lengths: dict[int, int] = {}
        self._owned: set[int] = set()  # slots whose buffer no fork shares yet: rows may be moved in place
        self.reserved = 0
        self.valid = torch.zeros(batch, 0, dtype=torch.bool, device=device)
        self.next_position = torch.zeros(batch, dtype=torch.long, device=device)

    def share(self, batch: int) -> KVCache:
        """Start `batch` rows behind this cache: one row without padding, which must not change any more."""
        if len(self.valid) != 1 or not self.valid.all() or self.prefix is not None:
            raise ValueError(f"prefix: must be one whole row without padding, got {tuple(self.valid.shape)} columns")
        other = KVCache(batch, self.valid.device)
        other.prefix, other.next_position = self, self.next_position.expand(batch)
        return other

    @property
    def length(self) -> int:
        """Columns of a row, padding and shared prefix included."""
        return self.valid.shape[1] + (0 if self.prefix is None else self.prefix.length)

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

    def update(self, key: Tensor, value: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Append (B, H, L, E) keys and values to a slot and return all of the slot's.

        Gradients flow into the returned tensors; without gradients the cache is written in place.
        """
        start, buffer = self._lengths.get(slot, 0), self._buffers.get(slot)
        end = start + key.shape[2]
        if buffer is not None and not key.requires_grad:
            if not buffer.claim(start, end):
                room = _with_room(self.columns(slot), max(end, self.reserved), buffer.data.shape[1])
                buffer = self._buffers[slot] = _Buffer(room, end, buffer.rows)
                self._owned.add(slot)
            for side, new in zip(buffer.data, (key, value), strict=True):
                side[: buffer.rows, :, start:end] = new
        else:
            data = torch.stack((key, value))
            if buffer is not None:  # autograd refuses a tensor that changes in place after it was saved
                data = torch.cat((self.columns(slot), data), 3)
            elif end < self.reserved and not key.requires_grad:
                data = _with_room(data, self.reserved, len(key))
            self._buffers[slot] = _Buffer(data, end, len(key))
        self._lengths[slot] = end
        data = self.columns(slot)
        return data[0], data[1]

    def columns(self, slot: int) -> Tensor:
        """Return keys and values of a used slot, (2, B, H, S, E)."""
        if slot not in self._lengths and self.prefix is not None:
            return self.prefix.columns(slot)[..., :0, :].expand(-1, len(self.valid), -1, -1, -1)
        buffer = self._buffers[slot]
        return buffer.data[:, : buffer.rows, :, : self._lengths[slot]]

    def _store(self, slot: int, data: Tensor, columns: int, rows: int) -> None:
        """Set a slot's keys and values, of which no other cache has a view."""
        self._buffers[slot], self._lengths[slot] = _Buffer(data, columns, rows), columns
        self._owned.add(slot)

    def finish(self, loop_slots: Sequence[Sequence[int]], loops_B: Tensor, limit: int, columns: int) -> None:
        """Fill the slots of skipped loops after a pass over the newest `columns` columns of loops_B (B,) loops.

        A row's slots of loops that it did not run take its last keys and values, so that later columns may loop deeper:
        up to `limit`, or as deep as earlier columns reach. loop_slots: of each layer of the block, first loop first.
        """
        deepest, start = max(limit, self.depth(loop_slots)), self.valid.shape[1] - columns
        if int(loops_B.min()) >= deepest:
            return
        for slots in loop_slots:
            ran = [slot for slot in slots[:deepest] if self._lengths.get(slot, 0) > start]
            new = [self.columns(slot)[..., start:, :] for slot in ran]
            last = torch.stack(new)[loops_B - 1, :, torch.arange(len(loops_B), device=loops_B.device)].transpose(0, 1)
            for loop, columns_of_loop in enumerate(new):
                skipped = (loops_B <= loop)[:, None, None, None]
                columns_of_loop.copy_(torch.where(skipped, last, columns_of_loop))
            for slot in slots[len(ran) : deepest]:
                self.update(last[0], last[1], slot)

    def depth(self, loop_slots: Sequence[Sequence[int]]) -> int:
        """Return the loops of the deepest pass so far."""
        own = sum(slot in self._lengths for slot in loop_slots[0])
        return own if self.prefix is None else max(own, self.prefix.depth(loop_slots))

    def fork(self) -> KVCache:
        """Return an independent cache that shares the buffers."""
        other = copy.copy(self)
        other._buffers, other._lengths, other._owned = dict(self._buffers), dict(self._lengths), set()
        return other

    def select(self, rows: Tensor, columns: Tensor | slice = slice(None)) -> KVCache:
        """Copy the given rows (int64 (n,), repeats allowed), and of their own columns those selected."""
        other = self.fork()
        other.valid, other.next_position = self.valid[rows][:, columns], self.next_position[rows]
        length = other.valid.shape[1]
        for slot in self._lengths:
            data = _with_room(self.columns(slot)[:, rows][:, :, :, columns], length, len(rows))
            other._store(slot, data, length, len(rows))
        return other

    def row(self, row: int) -> KVCache:
        """Copy one row without the padding of its own columns."""
        return self.select(torch.tensor([row], device=self.valid.device), self.valid[row])

    def move(self, rows: Sequence[int]) -> KVCache:
        """Keep `rows` only, in this order, and drop columns that are padding in all of them.

        In place if it can be: neither this cache nor a fork of it may be used any more. A row keeps its place or comes
        from beyond the last one kept, so that none is overwritten before it moves; else raises ValueError.
        """
        places = [place for place, row in enumerate(rows) if place != row]
        if any(rows[place] < len(rows) for place in places):
            raise ValueError(f"rows: {rows} move onto one another")
        index = torch.tensor(rows, dtype=torch.long, device=self.valid.device)
        unused = int((self.valid[index].any(0).cumsum(0) == 0).sum())
        if self._owned != self._buffers.keys():
            return self.select(index, slice(unused, None))
        other = self.fork()
        other.valid, other.next_position = self.valid[index, unused:], self.next_position[index]
        for slot, buffer in self._buffers.items():
            buffer.data[:, places] = buffer.data[:, [rows[place] for place in places]]
            other._store(slot, buffer.data[..., unused:, :], self._lengths[slot] - unused, len(rows))
        return other

    def join(self, *others: KVCache, in_place: bool = False) -> KVCache:
        """Concatenate along the batch, these rows first; shorter rows are padded on the left. All use the same slots.

        in_place: append to this cache's buffers, or to a copy with room for twice the rows where they are too small.
        Neither this cache nor a fork of it may be used any more.
        """
        if any(other.prefix is not self.prefix for other in others):
            raise ValueError("others: must share one prefix with this cache")
        caches = (self, *others)
        columns, rows = max(cache.valid.shape[1] for cache in caches), sum(len(cache.valid) for cache in caches)
        slots = dict.fromkeys(slot for cache in caches for slot in cache._lengths)
        fits = in_place and self.valid.shape[1] == columns and slots.keys() <= self._owned
        fits = fits and all(rows <= self._buffers[slot].data.shape[1] for slot in slots)
        first, written = (len(self.valid), others) if fits else (0, caches)
        joined = self.fork()
        joined.valid = torch.cat([F.pad(cache.valid, (columns - cache.valid.shape[1], 0)) for cache in caches])
        joined.next_position = torch.cat([cache.next_position for cache in caches])
        for slot in slots:
            parts = [cache.columns(slot) for cache in written]
            room = 2 * rows if in_place else rows
            data = self._buffers[slot].data if fits else _with_room(parts[0][:, :0], columns, room)
            row = first
            for part in parts:
                place, start = data[:, row : row + part.shape[1]], columns - part.shape[3]
                place[..., :start, :] = 0  # not left empty: a masked NaN still spreads, since 0 * NaN is NaN
                place[..., start:columns, :] = part
                row += part.shape[1]
            joined._store(slot, data, columns, rows)
        return joined

    def crop(self, start: int, end: int) -> KVCache:
        """Fork with columns `start` to `end` of the rows' own only, at the same positions."""
        if not 0 <= start <= end <= self.valid.shape[1]:
            raise ValueError(f"columns: must be within 0 and {self.valid.shape[1]}, got {start} to {end}")
        other = self.fork()
        other.valid, other.next_position = self.valid[:, start:end], self.next_position - self.valid[:, end:].sum(1)
        # Without a start the buffers stay: they have free room behind the columns, so the next append need not copy.
        for slot in self._lengths:
            if start:
                other._buffers[slot] = _Buffer(self.columns(slot)[..., start:end, :], end - start, len(self.valid))
            other._lengths[slot] = end - start
        return other

    def keep_newest(self, counts: Sequence[int], columns: int) -> KVCache:
        """Keep of the newest `columns` columns each row's first `counts`, at least one, and hide what padding is left.

        Neither this cache nor a fork that has its newest columns may be used any more.
        """
        most = max(counts)
        end = self.valid.shape[1] - columns + most
        with _lock:  # the columns behind are free again for whoever appended last
            for slot, buffer in self._buffers.items():
                if buffer.used == self._lengths[slot]:
                    buffer.used -= columns - most
        other = self.crop(0, end)
        for row, count in enumerate(counts):
            hidden = other.valid[row, end - most + count :]
            other.next_position[row] -= hidden.sum()
            hidden[:] = False
        return other

    def whole(self) -> KVCache:
        """Return the same rows without a shared prefix, which is copied for each."""
        if self.prefix is None:
            return self
        cache = self.prefix.select(torch.zeros(len(self.valid), dtype=torch.long, device=self.valid.device))
        for slot in self._lengths:
            cache.update(self.columns(slot)[0], self.columns(slot)[1], slot)
        cache.valid, cache.next_position = torch.cat((cache.valid, self.valid), dim=1), self.next_position
        return cache

    def nbytes(self) -> int:
        """Return the bytes of the keys and values in use."""
        own = sum(self.columns(slot).nbytes for slot in self._lengths)
        return own if self.prefix is None else own + self.prefix.nbytes()


class RaggedBatch:
    """Caches of any length, all different, side by side in one pass in place of one cache. Rows are in their order.

    All but attention is computed for all rows together. Each cache attends to its own columns, so nothing is padded.
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches = list(caches)
        self._rows = [len(cache.valid) for cache in caches]

    @property
    def length(self) -> int:
        return max(cache.length for cache in self.caches)

    def extend(self, valid_BL: Tensor) -> tuple[Tensor, Any]:
        """Extend each cache as `KVCache.extend`; the mask is a list, which only the attention of `attend` takes."""
        extended = [cache.extend(valid) for cache, valid in zip(self.caches, valid_BL.split(self._rows), strict=True)]
        return torch.cat([positions for positions, _ in extended]), [mask for _, mask in extended]

    def attend(self, attention: Callable[[KVCache], Attend]) -> Attend:
        """Build the attention of all rows from that of each cache."""
        attends = [attention(cache) for cache in self.caches]

        def attend(slot: int, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
            parts = zip(attends, *(x.split(self._rows) for x in (q, k, v)), mask, strict=True)
            return torch.cat([one(slot, *part) for one, *part in parts])

        return attend

    def finish(self, loop_slots: Sequence[Sequence[int]], loops_B: Tensor, limit: int, columns: int) -> None:
        for cache, loops in zip(self.caches, loops_B.split(self._rows), strict=True):
            cache.finish(loop_slots, loops, limit, columns)


def _with_room(data: Tensor, columns: int, rows: int) -> Tensor:
    """Copy data (2, B, H, S, E) into a tensor of `rows` rows of `columns` columns and some more."""
    room = data.new_empty(2, rows, data.shape[2], columns + SLACK, data.shape[4])
    room[:, : data.shape[1], :, : data.shape[3]] = data
    return room
