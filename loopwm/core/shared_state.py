"""SharedState: rows that read one prefix together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loopwm.core.state import CoreState


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
            raise ValueError(f"prefix: {type(prefix).__name__} cannot be shared")
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
