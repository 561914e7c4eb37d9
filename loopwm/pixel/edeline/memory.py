"""Memory of a world: the looped core over one vector per step.

Stepping equals the parallel pass, `first` resets, no later step is visible.

Shape suffixes: B batch, T environment steps, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from loopwm.pixel.dynamics import Depth, DynamicsOutput, FrameCache, LoopedAttention, LoopedConfig, require_at_least


@dataclass(frozen=True)
class MemoryConfig(LoopedConfig):
    """Sizes of the memory."""

    max_loops: int = 2
    window: int = 96
    """Attention window in frames."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "window")


class Memory(nn.Module):
    """Recurrent embedding h_t = f(h_{t-1}, x_t) (EDELINE, section 5.1.1) by looped attention."""

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        self.config = config
        self.module = LoopedAttention(config.core(), config.window)

    def initial(self, batch: int, device: torch.device) -> FrameCache:
        return self.module.initial(batch, device)

    def forward(self, x: Tensor, first: Tensor, depth: Depth, state: FrameCache | None = None) -> DynamicsOutput:
        """Run T steps. With a plan, `state` must be None and the returned state is empty.

        x: inputs (B, T, D). first: bool (B, T), True where an episode begins. Returns h (B, T, D).
        """
        before = self.initial(len(x), x.device) if state is None else state
        # Counted over episodes, without a reset: rotary scores are of differences.
        positions = before.columns.next_position[:, None] + torch.arange(x.shape[1], device=x.device)
        out = self.module(x[:, :, None], positions[:, :, None, None], first, depth, state)
        return replace(out, h=out.h[:, :, 0])

    def step(self, x: Tensor, first: Tensor, depth: int, state: FrameCache) -> DynamicsOutput:
        """Run one step. x: (B, D), first: bool (B,); h and loops have no T."""
        out = self(x[:, None], first[:, None], depth, state)
        return DynamicsOutput(out.h[:, 0], out.state, out.loops[:, 0])
