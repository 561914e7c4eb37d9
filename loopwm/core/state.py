"""CoreState: what a world remembers, keys and values of every slot.

Columns are token positions of a padded batch. A row's padding stays in its columns for ever and is masked; that
keeps rows of different length in one batch without moving keys.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor


class CoreState:
    """Keys and values per slot, each (B, H, S, E), the columns that are real, and each row's next position.

    `append` writes in place into this object but never into its tensors, so a `fork` is cheap and independent.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.valid = torch.zeros(batch, 0, dtype=torch.bool, device=device)
        self.next_position = torch.zeros(batch, dtype=torch.long, device=device)

    def extend(self, valid_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Announces L new columns, of which `valid_BL` (B, L) bool are real.

        Returns their positions (B, L) and the attention mask (B, 1, L, S + L), True where a query may look: real
        columns up to itself. A padding column sees itself, so that its softmax is defined.
        """
        steps = valid_BL.long().cumsum(1)
        positions = (self.next_position[:, None] + steps - 1).clamp(min=0)
        length = valid_BL.shape[1]
        own = torch.ones(length, length, dtype=torch.bool, device=valid_BL.device).tril()
        new = own & valid_BL[:, None, :] | torch.eye(length, dtype=torch.bool, device=valid_BL.device)
        mask = torch.cat((self.valid[:, None, :].expand(-1, length, -1), new), dim=2)
        self.valid = torch.cat((self.valid, valid_BL), dim=1)
        self.next_position = self.next_position + steps[:, -1]
        return positions, mask[:, None]

    def update(self, key: Tensor, value: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Appends (B, H, L, E) keys and values to a slot and returns all of the slot's."""
        if slot in self.keys:
            key = torch.cat((self.keys[slot], key), dim=2)
            value = torch.cat((self.values[slot], value), dim=2)
        self.keys[slot], self.values[slot] = key, value
        return key, value

    def fork(self) -> CoreState:
        """An independent state that shares the tensors: changing one never changes the other."""
        other = copy.copy(self)
        other.keys, other.values = dict(self.keys), dict(self.values)
        return other

    def select(self, rows: Tensor) -> CoreState:
        """The state of the given rows (int64 (n,), repeats allowed)."""
        return self._map(lambda x: x[rows], self.valid[rows], self.next_position[rows])

    def crop(self, columns: int) -> CoreState:
        """The state without its last `columns` columns. Raises ValueError if it has fewer."""
        kept = self.valid.shape[1] - columns
        if columns < 0 or kept < 0:
            raise ValueError(f"cannot crop {columns} of {self.valid.shape[1]} columns")
        dropped = self.valid[:, kept:].sum(1)
        return self._map(lambda x: x[:, :, :kept], self.valid[:, :kept], self.next_position - dropped)

    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(x.nbytes for side in (self.keys, self.values) for x in side.values())

    def _map(self, change, valid: Tensor, next_position: Tensor) -> CoreState:  # type: ignore[no-untyped-def]
        other = self.fork()
        other.keys = {slot: change(x) for slot, x in self.keys.items()}
        other.values = {slot: change(x) for slot, x in self.values.items()}
        other.valid, other.next_position = valid, next_position
        return other
