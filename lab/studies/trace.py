"""Exit rule that replays recorded depths, bitwise in the same batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from loopwm.core.exit_rules import LoopView, exit_rule


@exit_rule("trace")
@dataclass(frozen=True)
class Trace:
    """Replay recorded depths: `loops[row][pass]`.

    After its last number a row takes one loop per pass, as a finished observation does while others of its batch
    decode.
    Raises ValueError for an empty trace or a number below 1.
    """

    loops: tuple[tuple[int, ...], ...]
    needs_gate: ClassVar[bool] = False
    depends_on_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.loops or min((loops for row in self.loops for loops in row), default=0) < 1:
            raise ValueError(f"loops: must be numbers from 1 on, got {self.loops}")

    @property
    def limit(self) -> int:
        return max(loops for row in self.loops for loops in row)

    def for_pass(self, index: int, rows: Sequence[int]) -> Trace:
        """Return the trace of one pass. Raises ValueError for a row beyond the trace."""
        if max(rows) >= len(self.loops):
            raise ValueError(f"loops: must have row {max(rows)}, got a trace of {len(self.loops)} rows")
        return Trace(tuple(self.loops[row][index : index + 1] or (1,) for row in rows))

    def exits(self, view: LoopView) -> Tensor:
        """Compare with the recorded depths. Raises ValueError if the batch and the trace differ in rows."""
        if len(self.loops) != len(view.states[-1]):
            raise ValueError(f"loops: must be {len(view.states[-1])} rows as the batch, got {len(self.loops)}")
        # `for_pass` has cut the trace to this pass.
        first = [row[0] for row in self.loops]
        return torch.tensor(first, device=view.states[-1].device) <= view.loop
