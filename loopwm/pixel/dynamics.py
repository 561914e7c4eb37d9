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

from loopwm.core import (
    Attend,
    AttentionInputs,
    CoreConfig,
    CoreOutput,
    CoreState,
    DepthPlan,
    ExitRule,
    Fixed,
    LoopedCore,
    SeesItself,
)
from loopwm.core.injection import identity_
from loopwm.pixel.positions import Rotary

Depth = int | ExitRule | DepthPlan
"""A plan is for training: each row loops as deep as it says."""

State = TypeVar("State")

NO_EPISODE = -1
"""Of frames that stand in a cache for its shape alone."""

COLUMNS_AT_ONCE = 64
"""Queries that attend in one call, or those of two frames where these are more: fewer calls, but more masked keys."""

CARRIED = 3.0
"""Parts of what was carried to one of what a frame brings, at first: with one it forgets before it has learned to
remember."""


@dataclass(frozen=True)
class LoopedConfig:
    """Sizes of a looped core over frames, which the systems' configurations begin with. Raises ValueError, naming the
    field, for sizes that are impossible."""

    dim: int = 512
    heads: int = 8
    mlp_dim: int = 1024
    prelude_layers: int = 1
    block_layers: int = 1
    coda_layers: int = 0
    mu_rec: float = 2.0
    default_depth: int = 2
    max_loops: int = 4

    def __post_init__(self) -> None:
        require_positive_sizes(self, "dim", "heads", "default_depth", "max_loops")
        if self.dim % self.heads:
            raise ValueError(f"dim: {self.dim} is not divisible by heads, {self.heads}")
        if self.default_depth > self.max_loops:
            raise ValueError(f"default_depth: {self.default_depth} is above max_loops, {self.max_loops}")

    def core(self) -> CoreConfig:
        return CoreConfig(
            dim=self.dim,
            heads=self.heads,
            head_dim=self.dim // self.heads,
            mlp_dim=self.mlp_dim,
            prelude_layers=self.prelude_layers,
            block_layers=self.block_layers,
            coda_layers=self.coda_layers,
            max_loops=self.max_loops,
            norm_eps=1e-6,
            zoh=False,
        )


def require_positive_sizes(config: object, *names: str) -> None:
    """Raises ValueError for the first of these fields that is below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name}: {getattr(config, name)} is below 1")


@dataclass(frozen=True)
class DynamicsOutput(Generic[State]):
    """h: (B, T, N, D) coda output; state: where the next call goes on; loops: (B, T) int64, of each frame.

    gate: (B, T, N, S) logits of the exit gate after each of the last S loops, of sampled depth alone.
    """

    h: Tensor
    state: State
    loops: Tensor
    gate: Tensor | None = None


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

    def check(self, depth: int | ExitRule) -> ExitRule:
        """The rule that `depth` stands for. Raises ValueError for one that the core does not allow."""
        return self.core.check(depth)

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
        episodes = episodes_of(first, state.episodes)
        out, columns = self._run(x, positions, self._mask(episodes, x.shape[1], x.shape[2]), rule, state.columns)
        kept = self._last_frames(FrameCache(columns, episodes), x.shape[2])
        return DynamicsOutput(out.h.view_as(x), kept, out.loops[:, None].expand(-1, x.shape[1]))

    def step(
        self, x: Tensor, positions: Tensor, first: Tensor, depth: int | ExitRule, state: FrameCache
    ) -> DynamicsOutput[FrameCache]:
        rule = self.core.check(depth)
        episodes = episodes_of(first[:, None], state.episodes)
        mask = self._mask(episodes, 1, x.shape[1])
        out, columns = self._run(x[:, None], positions[:, None], mask, rule, state.columns)
        columns.finish(self.core.config.loop_slots, out.loops, rule.limit, x.shape[1])
        kept = self._last_frames(FrameCache(columns, episodes), x.shape[1])
        return DynamicsOutput(out.h, kept, out.loops)

    def _sampled(self, x: Tensor, positions: Tensor, first: Tensor, plan: DepthPlan) -> DynamicsOutput[FrameCache]:
        nothing = self.initial(len(x), x.device)
        mask = self._mask(episodes_of(first, nothing.episodes), x.shape[1], x.shape[2])
        shared = self._inputs(positions, mask)
        out = self.core.forward_sampled(x.flatten(1, 2), shared, BlockCausal(x.shape[2]), plan)
        gate = None if out.gate_logits is None else out.gate_logits.unflatten(1, x.shape[1:3])
        return DynamicsOutput(out.h.view_as(x), nothing, out.loops[:, None].expand(-1, x.shape[1]), gate)

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
    """Each frame's slots take the latents of the frame before through a projection that starts as a multiple of the
    identity (LoopWM, equation 4: h_{k-1}).

    Slots see those of their own frame alone: time enters by the carried latents only, so a scan over T takes constant
    memory, and the gradient of a late loss reaches an early input through them.

    Departure: LoopWM gives h_{k-1} to the prelude. Here it is added behind it, and what is carried is the state before
    the coda, so that prelude and coda run over all frames at once and the scan holds the loops alone.
    """

    def __init__(self, config: CoreConfig, rotary: Rotary) -> None:
        super().__init__()
        self.core = LoopedCore(config)
        self.rotary = rotary
        self.carry = nn.Linear(config.dim, config.dim, bias=False)
        identity_(self.carry.weight)
        with torch.no_grad():
            self.carry.weight.mul_(CARRIED)

    def initial(self, batch: int, device: torch.device) -> Tensor:
        return torch.zeros(batch, 0, self.core.config.dim, device=device)

    def forward(
        self, x: Tensor, positions: Tensor, first: Tensor, depth: Depth, state: Tensor | None = None
    ) -> DynamicsOutput[Tensor]:
        batch, steps, slots, _ = x.shape
        plan = depth if isinstance(depth, DepthPlan) else None
        rule = None if isinstance(depth, DepthPlan) else self.core.check(depth)
        shared = self._shared(positions.flatten(0, 1))
        attend: Attend = SeesItself() if slots == 1 else _attend  # the slots of one frame
        p = self.core.run_prelude(x.flatten(0, 1), shared, attend).unflatten(0, (batch, steps))
        retention, matrix = self.core.injection.retention(), self.core.injection.matrix().to(p.dtype)
        noise = plan.initial_state(slots, x.shape[-1], x.device) if plan else None
        h = self.initial(batch, x.device) if state is None else state
        states, loops, gates = [], [], []
        for t in range(steps):
            drive = F.linear(self.core.input_norm(self._carried(p[:, t], first[:, t], h)), matrix)
            at = self._shared(positions[:, t]) if slots > 1 else shared
            if plan is not None and noise is not None:
                settled = self.core.settle_sampled(drive, retention, at, attend, plan, noise)
            elif rule is not None:
                settled = self.core.settle(drive, retention, at, attend, rule, slots)
            h = settled.state
            states.append(h)
            loops.append(settled.loops)
            gates.append(settled.gate_logits)
        read = torch.stack(states, 1).flatten(0, 1)
        out = self.core.read_out(read, shared, attend, x.dtype).view_as(x)
        gate = None if gates[0] is None else torch.stack([logits for logits in gates if logits is not None], 1)
        return DynamicsOutput(out, h, torch.stack(loops, 1), gate)

    def step(
        self, x: Tensor, positions: Tensor, first: Tensor, depth: int | ExitRule, state: Tensor
    ) -> DynamicsOutput[Tensor]:
        out = self(x[:, None], positions[:, None], first[:, None], depth, state)
        return DynamicsOutput(out.h[:, 0], out.state, out.loops[:, 0])

    def _shared(self, positions: Tensor) -> AttentionInputs:
        return AttentionInputs(*self.rotary.angles(positions))

    def _carried(self, p: Tensor, first: Tensor, state: Tensor) -> Tensor:
        if not state.shape[1]:
            return p
        return p + self.carry(torch.where(first[:, None, None], 0, state).to(p.dtype))


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


def episodes_of(first: Tensor, before: Tensor) -> Tensor:
    """The episode that each frame (B, frames) belongs to, those `before` included; never NO_EPISODE, which stands in a
    cache for its shape alone."""
    last = before[:, -1:].clamp(min=0) if before.shape[1] else torch.zeros_like(first[:, :1], dtype=torch.long)
    return torch.cat((before, last + first.long().cumsum(1)), 1)


def _attend(slot: int, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
    """Every query sees every key."""
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class BlockCausal:
    """Attention of frames of `slots` queries, the last columns of the keys, under a mask (B, 1, L, S) that hides the
    frames after a query's own: those are left out, which halves the work. Frames of few slots share a call."""

    slots: int

    def __call__(self, slot: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        dtype = v.dtype
        if q.device.type == "cpu":  # where half precision makes attention slower
            q, k, v = q.float(), k.float(), v.float()
        length, before, width = q.shape[2], k.shape[2] - q.shape[2], self.slots * max(2, COLUMNS_AT_ONCE // self.slots)
        parts = []
        with torch.autocast("cpu", enabled=False):
            for start in range(0, length, width):
                stop = min(start + width, length)
                seen = before + stop
                rows = mask[:, :, start:stop, :seen]
                parts.append(F.scaled_dot_product_attention(q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen], rows))
        return torch.cat(parts, 2).transpose(1, 2).flatten(2).to(dtype)
