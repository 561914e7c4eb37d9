"""CoreState: what a world remembers, keys and values of every slot.

Columns are token positions of a padded batch. A row's padding stays in its columns for ever and is masked; that
keeps rows of different length in one batch without moving keys.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional as F

SLACK = 64
"""Columns allocated beyond what is needed, so that decoding does not copy a cache for every token."""


class Planes(StrEnum):
    """What is kept of finished columns: keys and values of every loop, which is exact, or of the last loop alone."""

    PER_LOOP = "per_loop"
    LAST = "last"


def new_state(planes: Planes, batch: int, device: torch.device, loop_slots: Sequence[Sequence[int]]) -> CoreState:
    """An empty state; loop_slots: for each layer of the block, its slots from the first loop to the deepest."""
    if planes is Planes.LAST:
        return LastPlaneState(batch, device, loop_slots)
    return CoreState(batch, device)


_claiming = threading.Lock()
"""Forks of one state may go on in several threads."""


class _Buffer:
    """Keys and values (rows, H, columns, E) that forks share, with room for more of both.

    rows: that are in use. used: columns that one of the forks has written.
    """

    def __init__(self, key: Tensor, value: Tensor, used: int, rows: int | None = None) -> None:
        self.key, self.value, self.used = key, value, used
        self.rows = len(key) if rows is None else rows

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


class CoreState:
    """Keys and values per slot, each (B, H, S, E), the columns that are real, and each row's next position.

    Forks share buffers. The first that goes on writes into the free columns behind what they share, every other copies
    before its first write. Columns once written never change, so a fork is cheap and independent.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self._buffers: dict[int, _Buffer] = {}
        self._lengths: dict[int, int] = {}
        self._allocated: set[int] = set()
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

    def update(self, key: Tensor, value: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Appends (B, H, L, E) keys and values to a slot and returns all of the slot's.

        Gradients flow into what is returned; a state used without gradients writes in place.
        """
        start = self._lengths.get(slot, 0)
        end = start + key.shape[2]
        if slot not in self._buffers:
            self._buffers[slot] = _Buffer(key, value, end)
        elif key.requires_grad:
            old_key, old_value = self.columns(slot)
            self._buffers[slot] = _Buffer(torch.cat((old_key, key), 2), torch.cat((old_value, value), 2), end)
        else:
            buffer = self._writable(slot, start, end)
            buffer.key[: buffer.rows, :, start:end], buffer.value[: buffer.rows, :, start:end] = key, value
        self._lengths[slot] = end
        return self.columns(slot)

    def finish(self, loop_slots: Sequence[Sequence[int]], loops_B: Tensor, limit: int, columns: int) -> None:
        """Ends a pass over the newest `columns`, whose rows left the loop after loops_B (B,) loops.

        A row's slots of the loops it did not run take its last keys and values, so that later columns may loop
        deeper: up to `limit`, or as deep as earlier columns reach. loop_slots: as in `new_state`.
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

    def _writable(self, slot: int, start: int, end: int) -> _Buffer:
        """The slot's buffer, or a larger copy where others have gone on in it or room is short."""
        buffer = self._buffers[slot]
        if not buffer.claim(start, end):
            key, value = (_with_room(old, end, len(buffer.key)) for old in buffer.columns(start))
            buffer = self._buffers[slot] = _Buffer(key, value, end, buffer.rows)
            self._allocated.add(slot)
        return buffer

    def _empty(self) -> CoreState:
        return CoreState(0, self.valid.device)

    def fork(self) -> CoreState:
        """An independent state that shares the buffers: changing one never changes the other."""
        other = self._empty()
        other._buffers, other._lengths = dict(self._buffers), dict(self._lengths)
        other.valid, other.next_position = self.valid, self.next_position
        return other

    def select(self, rows: Tensor) -> CoreState:
        """The state of the given rows (int64 (n,), repeats allowed)."""
        other = self.fork()
        for slot, length in self._lengths.items():
            key, value = (_with_room(old[rows], length, len(rows)) for old in self.columns(slot))
            other._buffers[slot] = _Buffer(key, value, length)
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
        unused = _unused(valid)
        for slot, buffer in self._buffers.items():
            length = self._lengths[slot] - unused
            if slot in self._allocated:
                key, value = (_moved(side, rows)[:, :, unused:] for side in (buffer.key, buffer.value))
            else:
                key, value = (_with_room(side[index, :, unused:], length, len(rows)) for side in self.columns(slot))
            other._buffers[slot], other._lengths[slot] = _Buffer(key, value, length, len(rows)), length
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
                _place_rows(side, parts, buffer.rows, self._lengths[slot])
            other._buffers[slot] = _Buffer(buffer.key, buffer.value, self._lengths[slot], count)
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
            other._buffers[slot], other._lengths[slot] = _Buffer(key, value, length), length
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
                _place_rows(_room_like(parts[0], room, columns), parts, 0, columns)
                for parts in zip(*(x.columns(slot) for x in states), strict=True)
            )
            joined._buffers[slot] = _Buffer(key, value, columns, len(joined.valid))
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
        for slot, length in self._lengths.items():
            key, value = (side[:, :, dropped:] for side in self.columns(slot))
            other._buffers[slot], other._lengths[slot] = _Buffer(key, value, length - dropped), length - dropped
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
                state._buffers[slot] = _Buffer(key, named[f"value.{slot}"], key.shape[2])
                state._lengths[slot] = key.shape[2]
        return state

    def nbytes(self) -> int:
        """Bytes of the keys and values in use."""
        return sum(buffer.nbytes(self._lengths[slot]) for slot, buffer in self._buffers.items())


class LastPlaneState(CoreState):
    """Finished columns keep one plane of keys and values for all loops of a layer: that of their last loop.

    Within a pass every loop sees the pass's own columns at its own depth, and one and the same plane before them. The
    saving (Ouro, section 5.4.2: 1/T of the looped slots) is not exact beyond one loop, nor is a pass limited by the
    depth of earlier ones. A plane lies in the slot of its layer's first loop.
    """

    def __init__(self, batch: int, device: torch.device, loop_slots: Sequence[Sequence[int]]) -> None:
        super().__init__(batch, device)
        self._loop_slots = loop_slots
        self._plane = {slot: slots[0] for slots in loop_slots for slot in slots}
        self._pass: dict[int, tuple[Tensor, Tensor]] = {}

    def _empty(self) -> CoreState:
        return LastPlaneState(0, self.valid.device, self._loop_slots)

    def update(self, key: Tensor, value: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """As in every state, but what loops write counts only once the pass is finished."""
        if slot not in self._plane:
            return super().update(key, value, slot)
        self._pass[slot] = (key, value)
        if self._plane[slot] not in self._buffers:
            return key, value
        old_key, old_value = self.columns(self._plane[slot])
        return torch.cat((old_key, key), 2), torch.cat((old_value, value), 2)

    def finish(self, loop_slots: Sequence[Sequence[int]], loops_B: Tensor, limit: int, columns: int) -> None:
        """Ends a pass: each row's last keys and values go to the planes."""
        for slots in loop_slots:
            ran = [self._pass[slot] for slot in slots if slot in self._pass]
            super().update(*_last_loops(ran, loops_B), slots[0])
        self._pass.clear()


class SharedState(CoreState):
    """Rows that go on from one and the same row: its columns are kept once, beside each row's own.

    A row here is what it would be had the prefix been repeated for it. `valid`, `columns`, `crop` and what `update`
    returns speak of the rows' own columns; attention has to look at both (`prefix_attention`).
    """

    def __init__(self, prefix: CoreState, batch: int) -> None:
        """prefix: one row, all of whose columns are real. It must not change any more. Raises ValueError otherwise."""
        if len(prefix.valid) != 1 or not prefix.valid.all():
            raise ValueError(f"prefix: expected one row without padding, got {tuple(prefix.valid.shape)} columns")
        if type(prefix) is not CoreState:
            raise ValueError(f"prefix: {type(prefix).__name__} cannot be shared, it keeps its columns in another way")
        super().__init__(batch, prefix.valid.device)
        self.prefix = prefix
        self.next_position = prefix.next_position.expand(batch)

    def _empty(self) -> CoreState:
        return SharedState(self.prefix, 0)

    def columns(self, slot: int) -> tuple[Tensor, Tensor]:
        """Own keys and values of a slot, none of a row that has not gone on yet."""
        if slot in self._lengths:
            return super().columns(slot)
        key, value = (side[:, :, :0].expand(len(self.valid), -1, -1, -1) for side in self.prefix.columns(slot))
        return key, value

    @property
    def length(self) -> int:
        return self.prefix.length + super().length

    def alone(self, row: int) -> CoreState:
        own = self.trimmed(row)
        assert isinstance(own, SharedState)
        return own.whole()

    def depth(self, loop_slots: Sequence[Sequence[int]]) -> int:
        return max(super().depth(loop_slots), self.prefix.depth(loop_slots))

    def join(self, *others: CoreState) -> CoreState:
        """As in every state. Raises ValueError if one does not share the same prefix."""
        self._check_prefix(others)
        return super().join(*others)

    def absorb(self, *others: CoreState) -> CoreState:
        """As in every state. Raises ValueError if one does not share the same prefix."""
        self._check_prefix(others)
        return super().absorb(*others)

    def _check_prefix(self, others: Sequence[CoreState]) -> None:
        if any(not isinstance(other, SharedState) or other.prefix is not self.prefix for other in others):
            raise ValueError("states can be joined only if they share one prefix")

    def whole(self) -> CoreState:
        """The same rows with the prefix repeated for each."""
        rows = torch.zeros(len(self.valid), dtype=torch.long, device=self.valid.device)
        state = self.prefix.select(rows)
        for slot in self._lengths:
            state.update(*self.columns(slot), slot)
        state.valid = torch.cat((state.valid, self.valid), dim=1)
        state.next_position = self.next_position
        return state

    def tail(self, columns: int) -> CoreState:
        if columns > len(self.valid[0]):
            return self.whole().tail(columns)
        own = CoreState(0, self.valid.device)
        own._buffers, own._lengths = dict(self._buffers), dict(self._lengths)
        own.valid, own.next_position = self.valid, self.next_position
        return own.tail(columns)

    def tensors(self) -> dict[str, Tensor]:
        return self.whole().tensors()

    def nbytes(self) -> int:
        return super().nbytes() + self.prefix.nbytes()


def _last_loops(loops: Sequence[tuple[Tensor, ...]], loops_B: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's keys and values (B, H, C, E) of its last loop, from those of all loops that ran."""
    rows = torch.arange(len(loops_B), device=loops_B.device)
    key, value = (torch.stack(side)[loops_B - 1, rows] for side in zip(*loops, strict=True))
    return key, value


def _room_like(columns: Tensor, rows: int, length: int) -> Tensor:
    """Memory for so many rows and columns like these (B, H, S, E), and SLACK columns more."""
    return columns.new_empty(rows, columns.shape[1], length + SLACK, columns.shape[3])


def _with_room(columns: Tensor, length: int, rows: int) -> Tensor:
    """A copy of columns (B, H, S, E) with room for others."""
    buffer = _room_like(columns, rows, length)
    buffer[: len(columns), :, : columns.shape[2]] = columns
    return buffer


def _moved(buffer: Tensor, rows: Sequence[int]) -> Tensor:
    """The buffer with these rows at its beginning."""
    for place, row in enumerate(rows):
        if place != row:
            buffer[place] = buffer[row]
    return buffer


def _unused(valid_BS: Tensor) -> int:
    """Columns before the first that is real in any row."""
    used = valid_BS.any(0).nonzero()
    return int(used[0]) if len(used) else valid_BS.shape[1]


def _joined_rows(states: Sequence[CoreState], columns: int) -> tuple[Tensor, Tensor]:
    """`valid` and `next_position` of all rows, shorter ones padded on the left."""
    valid = torch.cat([F.pad(x.valid, (columns - x.valid.shape[1], 0)) for x in states])
    return valid, torch.cat([x.next_position for x in states])


def _place_rows(buffer: Tensor, parts: Sequence[Tensor], row: int, columns: int) -> Tensor:
    """Writes parts (B_i, H, S_i, E) into a buffer from this row on, each padded on the left to `columns`.

    The padding is zeros: masked columns must not hold NaN, which zero weights would not erase.
    """
    for part in parts:
        rows, start = buffer[row : row + len(part)], columns - part.shape[2]
        rows[:, :, :start] = 0
        rows[:, :, start:columns] = part
        row += len(part)
    return buffer
