"""CoreState: what a world remembers, keys and values of every slot.

Columns are token positions of a padded batch. A row's padding stays in its columns for ever and is masked; that
keeps rows of different length in one batch without moving keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from loopwm.core.buffers import Buffer, moved, place_rows, room_like, with_room


class CoreState:
    """Keys and values per slot, each (B, H, S, E), the columns that are real, and each row's next position.

    Forks share buffers. The first that goes on writes into the free columns behind what they share, every other copies
    before its first write. Columns once written never change, so a fork is cheap and independent.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self._buffers: dict[int, Buffer] = {}
        self._lengths: dict[int, int] = {}
        self._allocated: set[int] = set()
        self._reserved = 0
        self.valid = torch.zeros(batch, 0, dtype=torch.bool, device=device)
        self.next_position = torch.zeros(batch, dtype=torch.long, device=device)

    @property
    def length(self) -> int:
        """Columns of a row, its padding included."""
        return self.valid.shape[1]

    def extend(self, valid_BL: Tensor) -> tuple[Tensor, Tensor | None]:
        """Announces L new columns, of which `valid_BL` (B, L) bool are real.

        Returns their positions (B, L) and the attention mask (B, 1, L, S + L), True where a query may look: real
        columns up to itself. A padding column sees itself, so that its softmax is defined. The mask is None where
        plain causal attention does the same: first columns with any padding at their end.
        """
        steps = valid_BL.long().cumsum(1)
        positions = (self.next_position[:, None] + steps - 1).clamp(min=0)
        padded_at_end = bool((valid_BL[:, :-1] >= valid_BL[:, 1:]).all())
        mask = None if self.valid.shape[1] == 0 and padded_at_end else self._mask(valid_BL)
        self.valid = torch.cat((self.valid, valid_BL), dim=1)
        self.next_position = self.next_position + steps[:, -1]
        return positions, mask

    def _mask(self, valid_BL: Tensor) -> Tensor:
        length = valid_BL.shape[1]
        own = torch.ones(length, length, dtype=torch.bool, device=valid_BL.device).tril()
        new = own & valid_BL[:, None, :] | torch.eye(length, dtype=torch.bool, device=valid_BL.device)
        return torch.cat((self.valid[:, None, :].expand(-1, length, -1), new), dim=2)[:, None]

    def reserve(self, columns: int) -> None:
        """So many columns will come: who has to allocate memory does so for all of them at once."""
        self._reserved = columns

    def update(self, key: Tensor, value: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Appends (B, H, L, E) keys and values to a slot and returns all of the slot's.

        Gradients flow into what is returned; a state used without gradients writes in place.
        """
        start = self._lengths.get(slot, 0)
        end = start + key.shape[2]
        if slot not in self._buffers:
            if end < self._reserved and not key.requires_grad:
                key, value = (with_room(new, self._reserved, len(new)) for new in (key, value))
            self._buffers[slot] = Buffer(key, value, end)
        elif key.requires_grad:
            old_key, old_value = self.columns(slot)
            self._buffers[slot] = Buffer(torch.cat((old_key, key), 2), torch.cat((old_value, value), 2), end)
        else:
            buffer = self._writable(slot, start, end)
            buffer.key[: buffer.rows, :, start:end], buffer.value[: buffer.rows, :, start:end] = key, value
        self._lengths[slot] = end
        return self.columns(slot)

    def finish(self, loop_slots: Sequence[Sequence[int]], loops_B: Tensor, limit: int, columns: int) -> None:
        """Ends a pass over the newest `columns`, whose rows left the loop after loops_B (B,) loops.

        A row's slots of the loops it did not run take its last keys and values, so that later columns may loop
        deeper: up to `limit`, or as deep as earlier columns reach. loop_slots: for each layer of the block, its slots
        from the first loop to the deepest.
        """
        kept = max(limit, self.depth(loop_slots))
        if int(loops_B.min()) < kept:
            for slots in loop_slots:
                self._fill(slots[:kept], loops_B, columns)

    def depth(self, loop_slots: Sequence[Sequence[int]]) -> int:
        """Loops that the deepest pass so far has left keys and values of."""
        return sum(slot in self._lengths for slot in loop_slots[0])

    def _fill(self, slots: Sequence[int], loops_B: Tensor, columns: int) -> None:
        start = self.valid.shape[1] - columns
        ran = [slot for slot in slots if self._lengths.get(slot, 0) > start]
        new = [tuple(side[:, :, start:] for side in self.columns(slot)) for slot in ran]
        last = _last_loops(new, loops_B)
        for loop, sides in enumerate(new):
            void = (loops_B <= loop)[:, None, None, None]
            for side, filling in zip(sides, last, strict=True):
                side.copy_(torch.where(void, filling, side))
        for slot in slots[len(ran) :]:
            self.update(*last, slot)

    def columns(self, slot: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a used slot (B, H, S, E)."""
        return self._buffers[slot].columns(self._lengths[slot])

    def _writable(self, slot: int, start: int, end: int) -> Buffer:
        """The slot's buffer, or a larger copy where others have gone on in it or room is short."""
        buffer = self._buffers[slot]
        if not buffer.claim(start, end):
            length = max(end, self._reserved)
            key, value = (with_room(old, length, len(buffer.key)) for old in buffer.columns(start))
            buffer = self._buffers[slot] = Buffer(key, value, end, buffer.rows)
            self._allocated.add(slot)
        return buffer

    def _empty(self) -> CoreState:
        return CoreState(0, self.valid.device)

    def fork(self) -> CoreState:
        """An independent state that shares the buffers: changing one never changes the other."""
        other = self._empty()
        other._buffers, other._lengths, other._reserved = dict(self._buffers), dict(self._lengths), self._reserved
        other.valid, other.next_position = self.valid, self.next_position
        return other

    def select(self, rows: Tensor) -> CoreState:
        """The state of the given rows (int64 (n,), repeats allowed)."""
        other = self.fork()
        for slot, length in self._lengths.items():
            key, value = (with_room(old[rows], length, len(rows)) for old in self.columns(slot))
            other._buffers[slot] = Buffer(key, value, length)
        other._allocated = set(other._buffers)
        other.valid, other.next_position = self.valid[rows], self.next_position[rows]
        return other

    def move(self, rows: Sequence[int]) -> CoreState:
        """The state of the given rows, made of this one: neither it nor a fork of it may be used any more.

        What it has allocated stays where it is: only a row that changes its place is copied, over one that is given
        up. Columns that are left without use at the beginning are given up, too. Raises ValueError if a row were copied
        over one that is still to come.
        """
        if any(place != row < len(rows) for place, row in enumerate(rows)):
            raise ValueError(f"rows: {rows} move onto one another")
        index = torch.tensor(rows, dtype=torch.long, device=self.valid.device)
        other, valid = self.fork(), self.valid[index]
        # Columns before the first that is real in any row.
        used = valid.any(0).nonzero()
        unused = int(used[0]) if len(used) else valid.shape[1]
        for slot, buffer in self._buffers.items():
            length = self._lengths[slot] - unused
            if slot in self._allocated:
                key, value = (moved(side, rows)[:, :, unused:] for side in (buffer.key, buffer.value))
            else:
                key, value = (with_room(side[index, :, unused:], length, len(rows)) for side in self.columns(slot))
            other._buffers[slot], other._lengths[slot] = Buffer(key, value, length, len(rows)), length
        other._allocated = set(other._buffers)
        other.valid, other.next_position = valid[:, unused:], self.next_position[index]
        return other

    def absorb(self, *others: CoreState) -> CoreState:
        """One state of all batches, as `join` makes it, but made of this one: neither it nor a fork of it may be used
        any more.

        Rows are copied into room that this one has allocated; where it is short, all are copied to where there is
        twice as much.
        """
        count, columns = sum(len(x.valid) for x in (self, *others)), self.valid.shape[1]
        fits = all(x.valid.shape[1] <= columns for x in others) and all(
            slot in self._allocated and count <= len(buffer.key) for slot, buffer in self._buffers.items()
        )
        if not fits:
            return self._joined(others, room=2 * count)
        other = self.fork()
        other.valid, other.next_position = _joined_rows((self, *others), columns)
        for slot, buffer in self._buffers.items():
            for side, *parts in zip((buffer.key, buffer.value), *(x.columns(slot) for x in others), strict=True):
                place_rows(side, parts, buffer.rows, self._lengths[slot])
            other._buffers[slot] = Buffer(buffer.key, buffer.value, self._lengths[slot], count)
        other._allocated = set(other._buffers)
        return other

    def alone(self, row: int) -> CoreState:
        """The state of one row, without its padding, which shares nothing."""
        return self.trimmed(row)

    def trimmed(self, row: int) -> CoreState:
        """The state of one row, without the padding of its own columns."""
        real, other = self.valid[row], self.fork()
        length = int(real.sum())
        for slot in self._lengths:
            key, value = (side[row : row + 1, :, real] for side in self.columns(slot))
            other._buffers[slot], other._lengths[slot] = Buffer(key, value, length), length
        other._allocated = set(other._buffers)
        other.valid, other.next_position = self.valid[row : row + 1, real], self.next_position[row : row + 1]
        return other

    def join(self, *others: CoreState) -> CoreState:
        """One state of all batches, these rows first; shorter ones are padded on the left.

        All must have used the same slots.
        """
        return self._joined(others, room=sum(len(x.valid) for x in (self, *others)))

    def _joined(self, others: Sequence[CoreState], room: int) -> CoreState:
        states = (self, *others)
        columns = max(x.valid.shape[1] for x in states)
        joined = self._empty()
        joined.valid, joined.next_position = _joined_rows(states, columns)
        for slot in dict.fromkeys(slot for x in states for slot in x._lengths):
            key, value = (
                place_rows(room_like(parts[0], room, columns), parts, 0, columns)
                for parts in zip(*(x.columns(slot) for x in states), strict=True)
            )
            joined._buffers[slot] = Buffer(key, value, columns, len(joined.valid))
            joined._lengths[slot] = columns
        joined._allocated = set(joined._buffers)
        return joined

    def crop(self, columns: int) -> CoreState:
        """The state without its last `columns` columns. Raises ValueError if it has fewer."""
        kept = self.valid.shape[1] - columns
        if columns < 0 or kept < 0:
            raise ValueError(f"cannot crop {columns} of {self.valid.shape[1]} columns")
        other = self.fork()
        other._lengths = {slot: length - columns for slot, length in self._lengths.items()}
        other.valid = self.valid[:, :kept]
        other.next_position = self.next_position - self.valid[:, kept:].sum(1)
        return other

    def tail(self, columns: int) -> CoreState:
        """The state with its last `columns` columns only, at the same positions. Raises ValueError if it has fewer."""
        dropped = self.valid.shape[1] - columns
        if columns < 0 or dropped < 0:
            raise ValueError(f"cannot keep {columns} of {self.valid.shape[1]} columns")
        other = self.fork()
        if not dropped:  # the room behind the columns stays: what comes next is written there, not copied
            return other
        for slot, length in self._lengths.items():
            key, value = (side[:, :, dropped:] for side in self.columns(slot))
            other._buffers[slot], other._lengths[slot] = Buffer(key, value, length - dropped), length - dropped
        other.valid = self.valid[:, dropped:]
        return other

    def tensors(self) -> dict[str, Tensor]:
        """Everything the state holds, by name: what `from_tensors` takes."""
        named = {"valid": self.valid, "next_position": self.next_position}
        for slot in self._buffers:
            key, value = self.columns(slot)
            named |= {f"key.{slot}": key.contiguous(), f"value.{slot}": value.contiguous()}
        return named

    @classmethod
    def from_tensors(cls, named: Mapping[str, Tensor]) -> CoreState:
        """Raises KeyError if a tensor is missing."""
        state = cls(0, named["valid"].device)
        state.valid, state.next_position = named["valid"], named["next_position"]
        for name, key in named.items():
            if name.startswith("key."):
                slot = int(name.removeprefix("key."))
                state._buffers[slot] = Buffer(key, named[f"value.{slot}"], key.shape[2])
                state._lengths[slot] = key.shape[2]
        return state

    def nbytes(self) -> int:
        """Bytes of the keys and values in use."""
        return sum(buffer.nbytes(self._lengths[slot]) for slot, buffer in self._buffers.items())


def _last_loops(loops: Sequence[tuple[Tensor, ...]], loops_B: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's keys and values (B, H, C, E) of its last loop, from those of all loops that ran."""
    rows = torch.arange(len(loops_B), device=loops_B.device)
    key, value = (torch.stack(side)[loops_B - 1, rows] for side in zip(*loops, strict=True))
    return key, value


def _joined_rows(states: Sequence[CoreState], columns: int) -> tuple[Tensor, Tensor]:
    """`valid` and `next_position` of all rows, shorter ones padded on the left."""
    valid = torch.cat([F.pad(x.valid, (columns - x.valid.shape[1], 0)) for x in states])
    return valid, torch.cat([x.next_position for x in states])
