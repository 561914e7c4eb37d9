"""The looped core over frames: each environment step is a frame of N slots that see each other and all frames before.

`Dynamics` is what a pixel world needs of its core; `LoopedAttention` carries time in cached keys and values, block
after block, and is parallel over T; `LoopedRecurrence` carries it in the slots' latents, with constant memory.

Shape suffixes: B batch, T environment steps, N slots of a frame, P coordinates, S columns of keys, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.core import AttentionInputs, CoreConfig, CoreOutput, CoreState, DepthPlan, ExitRule, Fixed, LoopedCore
from loopwm.pixel.positions import Rotary

Depth = int | ExitRule | DepthPlan
"""A plan is for training: each row loops as deep as it says."""

State = TypeVar("State")

NO_EPISODE = -1
"""Of frames that stand in a cache for its shape alone."""

FRAMES_AT_ONCE = 2
"""Whose queries attend in one call: fewer calls, but more keys that are masked."""


@dataclass(frozen=True)
class DynamicsOutput(Generic[State]):
    """h: (B, T, N, D) coda output; state: where the next call goes on; loops: (B, T) int64, of each frame."""

    h: Tensor
    state: State
    loops: Tensor


class Dynamics(Protocol[State]):
    """Latent dynamics over frames. `forward` over T steps equals `step` repeated.

    `first` (B, T) bool marks frames that see nothing before them. Raises ValueError for a depth outside
    1 .. max_loops.
    """

    def initial(self, batch: int, device: torch.device) -> State: ...

    def forward(
        self, x: Tensor, positions: Tensor, first: Tensor, depth: Depth, state: State | None = None
    ) -> DynamicsOutput[State]:
        """x: (B, T, N, D), positions: (B, T, N, P)."""
        ...

    def step(
        self, x: Tensor, positions: Tensor, first: Tensor, depth: int | ExitRule, state: State
    ) -> DynamicsOutput[State]:
        """x: (B, N, D), positions: (B, N, P), first: (B,); h and loops come without T."""
        ...


@dataclass(frozen=True)
class FrameCache:
    """Keys and values of the frames so far, and the episode (B, frames) that each belongs to, counted by row."""

    columns: CoreState
    episodes: Tensor

    def select(self, rows: Tensor) -> FrameCache:
        """The cache of the given rows (int64 (n,), repeats allowed)."""
        return FrameCache(self.columns.select(rows), self.episodes[rows])

    def join(self, other: FrameCache) -> FrameCache:
        """One cache of both batches, these rows first. The one of fewer frames gets some before it that nobody sees."""
        ours, theirs = self._with_slots_of(other), other._with_slots_of(self)
        frames = max(ours.episodes.shape[1], theirs.episodes.shape[1])
        episodes = [F.pad(x.episodes, (frames - x.episodes.shape[1], 0), value=NO_EPISODE) for x in (ours, theirs)]
        return FrameCache(ours.columns.join(theirs.columns), torch.cat(episodes))

    def _with_slots_of(self, other: FrameCache) -> FrameCache:
        """A cache that holds nothing yet gets columns to stand beside those of the other."""
        if self.episodes.shape[1] or not other.episodes.shape[1]:
            return self
        batch, frames = len(self.episodes), other.episodes.shape[1]
        any_row = torch.zeros(batch, dtype=torch.long, device=other.episodes.device)
        return FrameCache(other.columns.select(any_row), self.episodes.new_full((batch, frames), NO_EPISODE))


class LoopedAttention(nn.Module):
    """Block-causal attention over the last `window` frames: a frame sees itself whole, and those before it (TWISTED,
    figure 7)."""

    def __init__(self, config: CoreConfig, rotary: Rotary, window: int) -> None:
        super().__init__()
        self.core = LoopedCore(config)
        self.rotary = rotary
        self.window = window

    def initial(self, batch: int, device: torch.device) -> FrameCache:
        empty = torch.zeros(batch, 0, dtype=torch.long, device=device)
        return FrameCache(CoreState(batch, device), empty)

    def forward(
        self, x: Tensor, positions: Tensor, first: Tensor, depth: Depth, state: FrameCache | None = None
    ) -> DynamicsOutput[FrameCache]:
        """As in `Dynamics`. Rules that let frames leave one by one go step by step; all else is one parallel pass.

        A plan is for whole sequences: with it, `state` must be None and what it returns holds nothing.
        """
        if isinstance(depth, DepthPlan):
            if state is not None:
                raise ValueError("state: depths are sampled for whole sequences")
            return self._sampled(x, positions, first, depth)
        rule = self.core.check(depth)
        state = self.initial(len(x), x.device) if state is None else state
        if not isinstance(rule, Fixed):
            return scan(self.step, x, positions, first, rule, state)
        episodes = _episodes(first, state.episodes)
        out, columns = self._run(x, positions, self._mask(episodes, x.shape[1], x.shape[2]), rule, state.columns)
        kept = self._last_frames(FrameCache(columns, episodes), x.shape[2])
        return DynamicsOutput(out.h.view_as(x), kept, out.loops[:, None].expand(-1, x.shape[1]))

    def step(
        self, x: Tensor, positions: Tensor, first: Tensor, depth: int | ExitRule, state: FrameCache
    ) -> DynamicsOutput[FrameCache]:
        rule = self.core.check(depth)
        episodes = _episodes(first[:, None], state.episodes)
        mask = self._mask(episodes, 1, x.shape[1])
        out, columns = self._run(x[:, None], positions[:, None], mask, rule, state.columns)
        columns.finish(self.core.config.loop_slots, out.loops, rule.limit, x.shape[1])
        kept = self._last_frames(FrameCache(columns, episodes), x.shape[1])
        return DynamicsOutput(out.h, kept, out.loops)

    def _sampled(self, x: Tensor, positions: Tensor, first: Tensor, plan: DepthPlan) -> DynamicsOutput[FrameCache]:
        nothing = self.initial(len(x), x.device)
        mask = self._mask(_episodes(first, nothing.episodes), x.shape[1], x.shape[2])
        shared = self._inputs(positions, mask)
        out = self.core.forward_sampled(x.flatten(1, 2), shared, BlockCausal(x.shape[2]), plan)
        return DynamicsOutput(out.h.view_as(x), nothing, out.loops[:, None].expand(-1, x.shape[1]))

    def _run(
        self, x: Tensor, positions: Tensor, mask: Tensor, rule: ExitRule, before: CoreState
    ) -> tuple[CoreOutput, CoreState]:
        columns = before.fork()
        columns.extend(torch.ones(len(x), x.shape[1] * x.shape[2], dtype=torch.bool, device=x.device))

        attend_frames = BlockCausal(x.shape[2])

        def attend(slot: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return attend_frames(slot, q, *columns.update(k, v, slot), mask)

        shared = self._inputs(positions, mask)
        return self.core(x.flatten(1, 2), shared, attend, rule, exit_columns=x.shape[2]), columns

    def _inputs(self, positions: Tensor, mask: Tensor) -> AttentionInputs:
        cos, sin = self.rotary.angles(positions.flatten(1, 2))
        return AttentionInputs(cos, sin, mask)

    def _mask(self, episodes: Tensor, steps: int, slots: int) -> Tensor:
        """(B, 1, steps * slots, S) bool for the last `steps` of the frames: who sees whom."""
        frames = torch.arange(episodes.shape[1], device=episodes.device)
        queries = frames[-steps:, None]
        near = (frames <= queries) & (frames > queries - self.window)
        seen = near & (episodes[:, -steps:, None] == episodes[:, None])
        return seen.repeat_interleave(slots, 1).repeat_interleave(slots, 2)[:, None]

    def _last_frames(self, cache: FrameCache, slots: int) -> FrameCache:
        """What a frame to come can still see."""
        kept = min(self.window - 1, cache.episodes.shape[1])
        return FrameCache(cache.columns.tail(kept * slots), cache.episodes[:, cache.episodes.shape[1] - kept :])


class LoopedRecurrence(nn.Module):
    """Each frame's slots take the latents of the frame before through a projection that starts at zero (LoopWM,
    equation 4: h_{k-1}).

    Slots see those of their own frame alone: time enters by the carried latents only, so a scan over T takes constant
    memory, and the gradient of a late loss reaches an early input through them.
    """

    def __init__(self, config: CoreConfig, rotary: Rotary) -> None:
        super().__init__()
        self.core = LoopedCore(config)
        self.rotary = rotary
        self.carry = nn.Linear(config.dim, config.dim, bias=False)
        nn.init.zeros_(self.carry.weight)

    def initial(self, batch: int, device: torch.device) -> Tensor:
        return torch.zeros(batch, 0, self.core.config.dim, device=device)

    def forward(
        self, x: Tensor, positions: Tensor, first: Tensor, depth: Depth, state: Tensor | None = None
    ) -> DynamicsOutput[Tensor]:
        state = self.initial(len(x), x.device) if state is None else state
        if not isinstance(depth, DepthPlan):
            return scan(self.step, x, positions, first, self.core.check(depth), state)

        def run(x: Tensor, positions: Tensor, first: Tensor, plan: DepthPlan, state: Tensor) -> DynamicsOutput[Tensor]:
            shared = AttentionInputs(*self.rotary.angles(positions))
            out = self.core.forward_sampled(self._carried(x, first, state), shared, _attend, plan)
            return DynamicsOutput(out.h, out.h, out.loops)

        return scan(run, x, positions, first, depth, state)

    def step(
        self, x: Tensor, positions: Tensor, first: Tensor, depth: int | ExitRule, state: Tensor
    ) -> DynamicsOutput[Tensor]:
        shared = AttentionInputs(*self.rotary.angles(positions))
        out = self.core(self._carried(x, first, state), shared, _attend, depth, exit_columns=x.shape[1])
        return DynamicsOutput(out.h, out.h, out.loops)

    def _carried(self, x: Tensor, first: Tensor, state: Tensor) -> Tensor:
        if not state.shape[1]:
            return x
        return x + self.carry(torch.where(first[:, None, None], 0, state).to(x.dtype))


def scan(
    step: Callable[[Tensor, Tensor, Tensor, Any, State], DynamicsOutput[State]],
    x: Tensor,
    positions: Tensor,
    first: Tensor,
    depth: Any,
    state: State,
) -> DynamicsOutput[State]:
    """`step` over T environment steps."""
    h, loops = [], []
    for t in range(x.shape[1]):
        out = step(x[:, t], positions[:, t], first[:, t], depth, state)
        state = out.state
        h.append(out.h)
        loops.append(out.loops)
    return DynamicsOutput(torch.stack(h, 1), state, torch.stack(loops, 1))


def _episodes(first: Tensor, before: Tensor) -> Tensor:
    """The episode that each frame (B, frames) belongs to, those `before` included."""
    last = before[:, -1:] if before.shape[1] else torch.zeros_like(first[:, :1], dtype=torch.long)
    return torch.cat((before, last + first.long().cumsum(1)), 1)


def _attend(slot: int, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
    """Every query sees every key."""
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class BlockCausal:
    """Attention of frames of `slots` queries, the last columns of the keys, under a mask (B, 1, L, S) that hides the
    frames after a query's own: those are left out, which halves the work. `FRAMES_AT_ONCE` share one call."""

    slots: int

    def __call__(self, slot: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        dtype = v.dtype
        if q.device.type == "cpu":  # where half precision makes attention slower
            q, k, v = q.float(), k.float(), v.float()
        length, before, width = q.shape[2], k.shape[2] - q.shape[2], self.slots * FRAMES_AT_ONCE
        parts = []
        with torch.autocast("cpu", enabled=False):
            for start in range(0, length, width):
                stop = min(start + width, length)
                seen = before + stop
                rows = mask[:, :, start:stop, :seen]
                parts.append(F.scaled_dot_product_attention(q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen], rows))
        return torch.cat(parts, 2).transpose(1, 2).flatten(2).to(dtype)
