"""StateGroup: rows of several states in one pass, each with columns of its own.

Everything but attention is computed for all rows together; each state keeps and reads its own keys and values, so
states of any length go together and nothing is padded or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from loopwm.core.block import Attend
from loopwm.core.state import CoreState


class StateGroup:
    """Takes the place of a state in a pass. Rows lie in the order of the states."""

    def __init__(self, states: Sequence[CoreState]) -> None:
        """states: all different, at least one."""
        self.states = list(states)
        self._rows = [len(state.valid) for state in states]

    @property
    def length(self) -> int:
        """Columns of the longest row."""
        return max(state.length for state in self.states)

    def extend(self, valid_BL: Tensor) -> tuple[Tensor, Any]:
        """As `CoreState.extend`, but for the mask, which only the attention of `attend` understands."""
        extended = [state.extend(valid) for state, valid in self._parts(valid_BL)]
        return torch.cat([positions for positions, _ in extended]), [mask for _, mask in extended]

    def attend(self, attention: Callable[[CoreState], Attend]) -> Attend:
        """The attention of the whole out of that of each state."""
        attends = [attention(state) for state in self.states]

        def attend(slot: int, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
            parts = zip(attends, *(x.split(self._rows) for x in (q, k, v)), mask, strict=True)
            return torch.cat([one(slot, *part) for one, *part in parts])

        return attend

    def finish(self, loop_slots: Sequence[Sequence[int]], loops_B: Tensor, limit: int, columns: int) -> None:
        """As `CoreState.finish`."""
        for state, loops in self._parts(loops_B):
            state.finish(loop_slots, loops, limit, columns)

    def _parts(self, rows: Tensor) -> Sequence[tuple[CoreState, Tensor]]:
        return list(zip(self.states, rows.split(self._rows), strict=True))
