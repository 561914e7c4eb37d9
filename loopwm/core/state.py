"""CoreState: what a world remembers, keys and values of every slot.

Columns are token positions of a padded batch. A row's padding stays in its columns for ever and is masked; that
keeps rows of different length in one batch without moving keys.
"""

from __future__ import annotations

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


class CoreState:
    """Keys and values per slot, each (B, H, S, E), the columns that are real, and each row's next position.

    Forks share buffers. Only the state that allocated a buffer may write into the free columns behind its own; every
    other copies before its first write. Columns once written never change, so a fork is cheap and independent.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._lengths: dict[int, int] = {}
        self._owned: set[int] = set()
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
            self._buffers[slot] = (key, value)
        elif key.requires_grad:
            old_key, old_value = self.columns(slot)
            self._buffers[slot] = (torch.cat((old_key, key), 2), torch.cat((old_value, value), 2))
        else:
            self._reserve(slot, end)
            for buffer, new in zip(self._buffers[slot], (key, value), strict=True):
                buffer[:, :, start:end] = new
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
        key, value = self._buffers[slot]
        length = self._lengths[slot]
        return key[:, :, :length], value[:, :, :length]

    def _reserve(self, slot: int, end: int) -> None:
        """Makes the slot's buffer this state's own with room for `end` columns."""
        buffers = self._buffers[slot]
        if slot in self._owned and buffers[0].shape[2] >= end:
            return
        start = self._lengths[slot]

        def grown(old: Tensor) -> Tensor:
            new = old.new_empty(*old.shape[:2], end + SLACK, old.shape[3])
            new[:, :, :start] = old[:, :, :start]
            return new

        self._buffers[slot] = (grown(buffers[0]), grown(buffers[1]))
        self._owned.add(slot)

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
        other._buffers = {slot: (pair[0][rows], pair[1][rows]) for slot, pair in self._buffers.items()}
        other._owned = set(other._buffers)
        other.valid, other.next_position = self.valid[rows], self.next_position[rows]
        return other

    def move(self, rows: Sequence[int]) -> CoreState:
        """The state of the given rows, made of this one: neither it nor a fork of it may be used any more.

        What is owned stays where it is: only a row that changes its place is copied, over one that is given up. Raises
        ValueError if it were copied over one that is still to come.
        """
        if any(place != row < len(rows) for place, row in enumerate(rows)):
            raise ValueError(f"rows: {rows} move onto one another")
        rows_of_self = torch.tensor(rows, dtype=torch.long, device=self.valid.device)
        other = self.fork()
        for slot, pair in self._buffers.items():
            if slot not in self._owned:
                other._buffers[slot] = (pair[0][rows_of_self], pair[1][rows_of_self])
                continue
            for buffer in pair:
                for place, row in enumerate(rows):
                    if place != row:
                        buffer[place] = buffer[row]
            other._buffers[slot] = (pair[0][: len(rows)], pair[1][: len(rows)])
        other._owned = set(other._buffers)
        other.valid, other.next_position = self.valid[rows_of_self], self.next_position[rows_of_self]
        return other

    def alone(self, row: int) -> CoreState:
        """The state of one row, without its padding, which shares nothing."""
        return self.trimmed(row)

    def trimmed(self, row: int) -> CoreState:
        """The state of one row, without the padding of its own columns."""
        real, other = self.valid[row], self.fork()
        other._buffers = {
            slot: (key[row : row + 1, :, real], value[row : row + 1, :, real])
            for slot, (key, value) in ((slot, self.columns(slot)) for slot in self._lengths)
        }
        other._owned = set(other._buffers)
        other._lengths = dict.fromkeys(self._lengths, int(real.sum()))
        other.valid, other.next_position = self.valid[row : row + 1, real], self.next_position[row : row + 1]
        return other

    def join(self, other: CoreState) -> CoreState:
        """One state of both batches, these rows first; the shorter one is padded on the left.

        Both must have used the same slots.
        """
        columns = max(self.valid.shape[1], other.valid.shape[1])
        joined = self._empty()
        joined.valid = torch.cat([F.pad(x.valid, (columns - x.valid.shape[1], 0)) for x in (self, other)])
        joined.next_position = torch.cat((self.next_position, other.next_position))
        for slot in self._lengths:
            sides = zip(self.columns(slot), other.columns(slot), strict=True)
            key, value = (_stack_rows(pair, columns) for pair in sides)
            joined._buffers[slot], joined._lengths[slot] = (key, value), columns
        joined._owned = set(joined._buffers)
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
        other._buffers = {
            slot: (key[:, :, dropped:], value[:, :, dropped:]) for slot, (key, value) in self._buffers.items()
        }
        other._lengths = {slot: length - dropped for slot, length in self._lengths.items()}
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
                state._buffers[slot] = (key, named[f"value.{slot}"])
                state._lengths[slot] = key.shape[2]
        return state

    def nbytes(self) -> int:
        """Bytes of the keys and values in use."""
        return sum(x.numel() * x.element_size() for slot in self._buffers for x in self.columns(slot))


class LastPlaneState(CoreState):
    """Finished columns keep one plane of keys and values for all loops of a layer: that of their last loop.

    Within a pass every loop sees the pass's own columns at its own depth, and one and the same plane before them. The
    saving (Ouro: 1/T of the looped slots) is not exact beyond one loop, nor is a pass limited by the depth of earlier
    ones. A plane lies in the slot of its layer's first loop.
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

    @property
    def length(self) -> int:
        return self.prefix.length + super().length

    def alone(self, row: int) -> CoreState:
        own = self.trimmed(row)
        assert isinstance(own, SharedState)
        return own.whole()

    def depth(self, loop_slots: Sequence[Sequence[int]]) -> int:
        return max(super().depth(loop_slots), self.prefix.depth(loop_slots))

    def join(self, other: CoreState) -> CoreState:
        """As in every state. Raises ValueError if the other does not share the same prefix."""
        if not isinstance(other, SharedState) or other.prefix is not self.prefix:
            raise ValueError("states can be joined only if they share one prefix")
        return super().join(other)

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


def _stack_rows(parts: Sequence[Tensor], columns: int) -> Tensor:
    """Parts (B_i, H, S_i, E) as one buffer (sum B_i, H, columns + SLACK, E), each padded on the left to `columns`.

    The padding is zeros: masked columns must not hold NaN, which zero weights would not erase.
    """
    _, heads, _, width = parts[0].shape
    buffer = parts[0].new_empty(sum(map(len, parts)), heads, columns + SLACK, width)
    row = 0
    for part in parts:
        rows, start = buffer[row : row + len(part)], columns - part.shape[2]
        rows[:, :, :start] = 0
        rows[:, :, start:columns] = part
        row += len(part)
    return buffer
