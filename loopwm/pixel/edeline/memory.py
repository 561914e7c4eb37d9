"""Memory of a world: the looped core over one vector per step.

Stepping equals the parallel pass, `first` resets, no later step is visible.

Shape suffixes: B batch, T environment steps, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loopwm.pixel.dynamics import Depth, FrameCache, LoopedAttention, LoopedConfig, require_at_least


@dataclass(frozen=True)
class MemoryConfig(LoopedConfig):
    """Sizes of the memory."""

    max_loops: int = 2
    window: int = 96
    """Attention window in frames."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "window")
        if self.dim // self.heads % 2:
            raise ValueError(f"dim: must give each of {self.heads} heads an even width, got {self.dim}")


@dataclass(frozen=True)
class MemoryState:
    """State of a memory. cache: keys and values of past steps; steps: steps so far, int64 (B,)."""

    cache: FrameCache
    steps: Tensor

    def select(self, rows: Tensor) -> MemoryState:
        return MemoryState(self.cache.select(rows), self.steps[rows])


@dataclass(frozen=True)
class MemoryOutput:
    """Output of a memory. h: (B, T, D); state: after the last step; loops: int64 (B, T)."""

    h: Tensor
    state: MemoryState
    loops: Tensor


class Memory(nn.Module):
    """Recurrent embedding h_t = f(h_{t-1}, x_t) (EDELINE, section 5.1.1) by looped attention."""

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        self.config = config
        self.module = LoopedAttention(config.core(), config.window)

    def initial(self, batch: int, device: torch.device) -> MemoryState:
        return MemoryState(self.module.initial(batch, device), torch.zeros(batch, dtype=torch.long, device=device))

    def forward(self, x: Tensor, first: Tensor, depth: Depth, state: MemoryState | None = None) -> MemoryOutput:
        """Run T steps. With a plan, `state` must be None and the returned state is empty.

        x: inputs (B, T, D). first: bool (B, T), True where an episode begins.
        """
        before = self.initial(len(x), x.device) if state is None else state
        steps = torch.arange(x.shape[1], device=x.device)
        positions = (before.steps[:, None] + steps)[:, :, None, None]  # never reset: rotary scores are of differences
        out = self.module(x[:, :, None], positions, first, depth, None if state is None else state.cache)
        return MemoryOutput(out.h[:, :, 0], MemoryState(out.state, before.steps + x.shape[1]), out.loops)

    def step(self, x: Tensor, first: Tensor, depth: int, state: MemoryState) -> MemoryOutput:
        """Run one step. x: (B, D), first: bool (B,); h and loops have no T."""
        out = self(x[:, None], first[:, None], depth, state)
        return MemoryOutput(out.h[:, 0], out.state, out.loops[:, 0])
