"""Recurrent memory of a world: several modules behind one interface, one vector per step in and out.

The looped core as recurrence or attention, GRU, LSTM and Mamba satisfy `Dynamics`: stepping equals the parallel pass,
`first` resets, no later step is visible. `frames` above zero limits any of them to a window.

Shape suffixes: B batch, T environment steps, D width, S vectors of a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.core import DepthPlan
from loopwm.pixel.dynamics import (
    Depth,
    Dynamics,
    DynamicsOutput,
    FrameCache,
    LoopedAttention,
    LoopedConfig,
    LoopedRecurrence,
    require_positive_sizes,
)
from loopwm.pixel.edeline.mamba import Mamba
from loopwm.pixel.positions import Rotary1D

Kind = Literal["recurrence", "attention", "gru", "lstm", "mamba"]


@dataclass(frozen=True)
class MemoryConfig(LoopedConfig):
    """Sizes of the memory.

    The loop's sizes apply to the two looped kinds only; mamba has one layer for each of theirs.
    """

    kind: Kind = "recurrence"
    max_loops: int = 2
    window: int = 96
    """Attention window in frames."""
    frames: int = 0
    """Window of any kind, in steps; 0: no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive_sizes(self, "window")
        if self.frames < 0:
            raise ValueError(f"frames: must be at least 0, got {self.frames}")
        if self.dim // self.heads % 2:
            raise ValueError(f"dim: must give each of {self.heads} heads an even width, got {self.dim}")


@dataclass(frozen=True)
class MemoryState:
    """State of a memory.

    inner: state of the module
    steps: steps so far, int64 (B,)
    recent: inputs of a windowed memory, each with 1 where it begins an episode, (B, frames - 1, D + 1); else (B, 0, D +
    1)
    """

    inner: FrameCache | Tensor
    steps: Tensor
    recent: Tensor

    def select(self, rows: Tensor) -> MemoryState:
        inner = self.inner[rows] if isinstance(self.inner, Tensor) else self.inner.select(rows)
        return MemoryState(inner, self.steps[rows], self.recent[rows])

    def replace(self, rows: Tensor, fresh: MemoryState) -> MemoryState:
        """Return the state with rows int64 (R,) taken from `fresh`, a state of R rows in that order."""
        batch = len(self.steps)
        order = torch.arange(batch, device=rows.device)
        order[rows] = batch + torch.arange(len(rows), device=rows.device)
        joined = MemoryState(
            _join(self.inner, fresh.inner),
            torch.cat((self.steps, fresh.steps)),
            torch.cat(_pad_to_equal(self.recent, fresh.recent)),
        )
        return joined.select(order)


@dataclass(frozen=True)
class MemoryOutput:
    """Output of a memory. h: (B, T, D); state: after the last step; loops: int64 (B, T), 1 without a loop."""

    h: Tensor
    state: MemoryState
    loops: Tensor


class Memory(nn.Module):
    """Recurrent embedding h_t = f(h_{t-1}, x_t) (EDELINE, section 5.1.1) by the configured module."""

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        self.config = config
        self.module: Dynamics[FrameCache] | Dynamics[Tensor] = _module(config)

    def initial(self, batch: int, device: torch.device) -> MemoryState:
        steps = torch.zeros(batch, dtype=torch.long, device=device)
        return MemoryState(
            self.module.initial(batch, device), steps, torch.zeros(batch, 0, self.config.dim + 1, device=device)
        )

    def forward(self, x: Tensor, first: Tensor, depth: Depth, state: MemoryState | None = None) -> MemoryOutput:
        """Run T steps. With a plan, `state` must be None and the returned state is empty.

        Args:
            x: inputs (B, T, D)
            first: bool (B, T), True where an episode begins
            depth: loops of the looped kinds
            state: state before the first step
        """
        if self.config.frames:
            return self._windows(x, first, depth, state)
        at = self.initial(len(x), x.device) if state is None else state
        steps = torch.arange(x.shape[1], device=x.device)
        positions = (at.steps[:, None] + steps)[:, :, None, None]
        inner = None if state is None else state.inner
        out: DynamicsOutput[FrameCache | Tensor] = self.module(x[:, :, None], positions, first, depth, inner)  # type: ignore[operator]
        return MemoryOutput(out.h[:, :, 0], MemoryState(out.state, at.steps + x.shape[1], at.recent), out.loops)

    def step(self, x: Tensor, first: Tensor, depth: Depth, state: MemoryState) -> MemoryOutput:
        """Run one step. x: (B, D), first: bool (B,); h and loops have no T."""
        out = self(x[:, None], first[:, None], depth, state)
        return MemoryOutput(out.h[:, 0], out.state, out.loops[:, 0])

    def _windows(self, x: Tensor, first: Tensor, depth: Depth, state: MemoryState | None) -> MemoryOutput:
        """Run the module on the window before every step, each time from an empty state."""
        batch, steps, _ = x.shape
        width = self.config.frames
        at = self.initial(batch, x.device) if state is None else state
        inputs = torch.cat((at.recent, torch.cat((x, first[..., None].to(x.dtype)), -1)), 1)
        missing = width - 1 + steps - inputs.shape[1]
        padded = F.pad(inputs, (0, 0, missing, 0))
        # Mark padding as episodes of its own, so that the window's episode begins at its first real step.
        padded[:, missing, -1] = 1
        windows = padded.unfold(1, width, 1).permute(0, 1, 3, 2).flatten(0, 1)
        rows, begins = windows[..., :-1], windows[..., -1] > 0
        begins[:, 0] = True
        if isinstance(depth, DepthPlan):
            depth = _repeated(depth, steps)
        positions = torch.arange(width, device=x.device).expand(len(rows), width)[:, :, None, None]
        out = self.module(rows[:, :, None], positions, begins, depth)  # type: ignore[operator]
        h, loops = out.h[:, -1, 0].unflatten(0, (batch, steps)), out.loops[:, -1].unflatten(0, (batch, steps))
        recent = padded[:, padded.shape[1] - (width - 1) :]
        return MemoryOutput(h, MemoryState(at.inner, at.steps + steps, recent), loops)


def _module(config: MemoryConfig) -> Dynamics[FrameCache] | Dynamics[Tensor]:
    rotary = Rotary1D(config.dim // config.heads)
    match config.kind:
        case "recurrence":
            return LoopedRecurrence(config.core(), rotary)
        case "attention":
            return LoopedAttention(config.core(), rotary, config.window)
        case "gru":
            return Gated(nn.GRU(config.dim, config.dim, batch_first=True), 1)
        case "lstm":
            return Gated(nn.LSTM(config.dim, config.dim, batch_first=True), 2)
        case "mamba":
            return Mamba(config.dim, config.prelude_layers + config.block_layers + config.coda_layers)


class Gated(nn.Module):
    """GRU or LSTM as `Dynamics` of one-slot frames; depth has no effect. State: (B, S, D), h and an LSTM's cell."""

    def __init__(self, cell: nn.GRU | nn.LSTM, vectors: int) -> None:
        super().__init__()
        self.cell, self.vectors = cell, vectors

    def initial(self, batch: int, device: torch.device) -> Tensor:
        return torch.zeros(batch, self.vectors, self.cell.hidden_size, device=device)

    def forward(
        self, x: Tensor, positions: Tensor, first: Tensor, depth: Depth, state: Tensor | None = None
    ) -> DynamicsOutput[Tensor]:
        """Run T steps; see `Dynamics`.

        Splits the sequence where an episode begins in any row, since cuDNN cannot reset single rows.
        """
        state = self.initial(len(x), x.device) if state is None else state
        begins = first.any(0)
        begins[0] = True
        starts = [*begins.nonzero()[:, 0].tolist(), x.shape[1]]
        parts = []
        for start, stop in pairwise(starts):
            state = torch.where(first[:, start, None, None], 0, state)
            # cuDNN requires contiguous states.
            vectors = tuple(vector.contiguous() for vector in state.transpose(0, 1).split(1))
            out, after = self.cell(x[:, start:stop, 0], vectors if self.vectors > 1 else vectors[0])
            state = torch.cat(after if self.vectors > 1 else (after,)).transpose(0, 1)
            parts.append(out)
        return DynamicsOutput(torch.cat(parts, 1)[:, :, None], state, torch.ones_like(first, dtype=torch.long))

    def step(self, x: Tensor, positions: Tensor, first: Tensor, depth: Depth, state: Tensor) -> DynamicsOutput[Tensor]:
        out = self(x[:, None], positions[:, None], first[:, None], depth, state)
        return DynamicsOutput(out.h[:, 0], out.state, out.loops[:, 0])


def _repeated(plan: DepthPlan, times: int) -> DepthPlan:
    """Repeat each row's depth `times` times."""
    loops, seeds = (tuple(x for x in values for _ in range(times)) for values in (plan.loops, plan.noise_seeds))
    return DepthPlan(loops, plan.mu_bwd, seeds)


def _pad_to_equal(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Left-pad the shorter of two (.., S, D) tensors with zeros."""
    length = max(ours.shape[1], theirs.shape[1])
    return (F.pad(ours, (0, 0, length - ours.shape[1], 0)), F.pad(theirs, (0, 0, length - theirs.shape[1], 0)))


def _join(ours: FrameCache | Tensor, theirs: FrameCache | Tensor) -> FrameCache | Tensor:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return torch.cat(_pad_to_equal(ours, theirs))
    assert isinstance(ours, FrameCache)
    assert isinstance(theirs, FrameCache)
    return ours.join(theirs)
