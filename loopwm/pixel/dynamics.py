"""Looped core over frames: an environment step is a frame of N slots that attend to each other and to earlier frames.

Time is carried in cached keys and values, and all T frames run in parallel.

Shape suffixes: B batch, T environment steps, N slots of a frame, P coordinates, S key columns, D width, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.core.block import AttentionInputs
from loopwm.core.depth import DepthPlan
from loopwm.core.kv_cache import KVCache
from loopwm.core.looped import CoreConfig, LoopedCore


def space_time_axes(head_dim: int) -> list[int]:
    """Return the coordinate of (x, y, t) that each pair of a head rotates with, by falling frequency.

    They are x, y, x, y, ..., t, t (TWISTED, appendix C), three for space to one for time, as in VideoRoPE. Raises
    ValueError if x and y cannot get the same number of pairs.
    """
    if head_dim % 16:
        raise ValueError(f"head_dim: must be divisible by 16 for equal pairs of x and y, got {head_dim}")
    return [0, 1] * (3 * head_dim // 16) + [2] * (head_dim // 8)


def axial_angles(positions_BSP: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return cos and sin of rotary embeddings, (B, 1, S, E) float32 each; pair i rotates with coordinate axes[i].

    The paper (TWISTED, appendix C) rotates neighbouring dimensions (2i, 2i + 1), the core (i, i + E/2): the same scores
    under one permutation of a head's dimensions, which learned projections absorb.
    """
    frequencies = 10000.0 ** (-torch.arange(len(axes), device=positions_BSP.device) / len(axes))
    # Float32 whatever the model's dtype: bfloat16 rounds the angles of late frames.
    angles = positions_BSP[..., list(axes)].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos(), angles.sin()


Depth = int | DepthPlan
"""Loops of a pass. A `DepthPlan` is for training: it sets the loops of each row."""

NO_EPISODE = -1
"""Episode number of padding frames in a cache."""

COLUMNS_AT_ONCE = 64
"""Queries per attention call, or those of two frames if these are more: larger calls are fewer, but mask more keys."""


@dataclass(frozen=True)
class LoopedConfig:
    """Sizes of a looped core over frames, the base of the systems' configurations.

    Raises ValueError naming a field whose size is impossible.
    """

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
        require_at_least(1, self, "dim", "heads", "default_depth", "max_loops", "mlp_dim", "block_layers", "mu_rec")
        require_at_least(0, self, "prelude_layers", "coda_layers")
        if self.dim % self.heads:
            raise ValueError(f"dim: must be divisible by heads ({self.heads}), got {self.dim}")
        if self.dim // self.heads % 2:
            raise ValueError(f"dim: must give each of {self.heads} heads an even width, got {self.dim}")
        if self.default_depth > self.max_loops:
            raise ValueError(f"default_depth: must be at most max_loops ({self.max_loops}), got {self.default_depth}")

    def core(self) -> CoreConfig:
        same = {each.name: getattr(self, each.name) for each in fields(CoreConfig) if hasattr(self, each.name)}
        return CoreConfig(head_dim=self.dim // self.heads, norm_eps=1e-6, **same)


def require_at_least(least: int, config: object, *names: str) -> None:
    """Raise ValueError for the first of these fields that is below `least`."""
    for name in names:
        if getattr(config, name) < least:
            raise ValueError(f"{name}: must be at least {least}, got {getattr(config, name)}")


def as_pixels(obs: Tensor) -> Tensor:
    """Convert uint8 (..., H, W, C) to (N, C, H, W) in 0 to 1."""
    # Copy: group norm's backward pass crashes on a permuted input without gradient (torch 2.13), and frames of one
    # channel count as contiguous in any permutation.
    return obs.flatten(0, -4).permute(0, 3, 1, 2).float().clone(memory_format=torch.contiguous_format) / 255


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean where the mask is True, 0 if it is False everywhere."""
    return (x * mask).sum() / mask.sum().clamp(min=1)


@dataclass(frozen=True)
class FrameCache:
    """Keys and values of past frames, and the per-row episode number of each frame, (B, frames)."""

    columns: KVCache
    episodes: Tensor

    def select(self, rows: Tensor) -> FrameCache:
        """Select rows, int64 (n,); repeats are allowed."""
        return FrameCache(self.columns.select(rows), self.episodes[rows])

    def join(self, other: FrameCache) -> FrameCache:
        """Concatenate caches along the batch; left-pad the shorter with masked frames."""
        ours, theirs = self._with_slots_of(other), other._with_slots_of(self)
        frames = max(ours.episodes.shape[1], theirs.episodes.shape[1])
        episodes = [F.pad(x.episodes, (frames - x.episodes.shape[1], 0), value=NO_EPISODE) for x in (ours, theirs)]
        return FrameCache(ours.columns.join(theirs.columns), torch.cat(episodes))

    def replace(self, rows: Tensor, fresh: FrameCache) -> FrameCache:
        """Return the cache with rows int64 (R,) taken from `fresh`, a cache of R rows in that order."""
        batch = len(self.episodes)
        order = torch.arange(batch, device=rows.device)
        order[rows] = batch + torch.arange(len(rows), device=rows.device)  # fresh rows follow ours in the joined cache
        return self.join(fresh).select(order)

    def _with_slots_of(self, other: FrameCache) -> FrameCache:
        """Give an empty cache padding columns of the other's shape, so that the two can be joined."""
        if self.episodes.shape[1] or not other.episodes.shape[1]:
            return self
        batch, frames = len(self.episodes), other.episodes.shape[1]
        columns = other.columns.select(torch.zeros(batch, dtype=torch.long, device=other.episodes.device))
        columns.next_position = self.columns.next_position
        return FrameCache(columns, self.episodes.new_full((batch, frames), NO_EPISODE))


def replace_rows(state: Any, rows: Tensor, fresh: Any) -> Any:
    """Return a state with rows int64 (R,) taken from `fresh`, a state of R rows in that order.

    A state is a tensor (B, ...), a cache, a number of which the larger counts, or a dataclass of states.
    """
    if isinstance(state, Tensor):
        return state.index_copy(0, rows, fresh)
    if isinstance(state, FrameCache):
        return state.replace(rows, fresh)
    if isinstance(state, int):
        return max(state, fresh)
    parts = {f.name: replace_rows(getattr(state, f.name), rows, getattr(fresh, f.name)) for f in fields(state)}
    return replace(state, **parts)


@dataclass(frozen=True)
class DynamicsOutput:
    """Output of a pass over frames.

    h: coda output, (B, T, N, D)
    state: state after the last frame
    loops: loops of each frame, int64 (B, T)
    """

    h: Tensor
    state: FrameCache
    loops: Tensor


class LoopedAttention(nn.Module):
    """Block-causal attention over the last `window` frames (TWISTED, figure 7).

    A frame attends to itself and to earlier frames of its episode; `first`, bool (B, T), marks frames that begin one.
    """

    def __init__(self, config: CoreConfig, window: int, axes: Sequence[int] = ()) -> None:
        """Create the core. axes: coordinate that each rotary pair of a head rotates with; empty: the first, for all."""
        super().__init__()
        self.core, self.window = LoopedCore(config), window
        self.axes = list(axes) or [0] * (config.head_dim // 2)

    def initial(self, batch: int, device: torch.device) -> FrameCache:
        empty = torch.zeros(batch, 0, dtype=torch.long, device=device)
        return FrameCache(KVCache(batch, device), empty)

    def forward(
        self, x: Tensor, positions: Tensor, first: Tensor, depth: Depth, state: FrameCache | None = None
    ) -> DynamicsOutput:
        """Run T steps, equal to T calls of `step`. x: (B, T, N, D), positions: (B, T, N, P).

        A plan runs whole sequences: `state` must be None, and the returned state is empty. Raises ValueError for a
        depth outside 1 .. max_loops.
        """
        before = self.initial(len(x), x.device) if state is None else state
        episodes = episodes_of(first, before.episodes)
        cos, sin = axial_angles(positions.flatten(1, 2), self.axes)
        shared = AttentionInputs(cos, sin, self._mask(episodes, x.shape[1], x.shape[2]))
        slots, attend_frames = x.flatten(1, 2), BlockCausal(x.shape[2])
        if isinstance(depth, DepthPlan):
            if state is not None:
                raise ValueError("state: must be None with a depth plan, which runs whole sequences")
            latest, out = before, self.core.forward_sampled(slots, shared, attend_frames, depth)
        else:
            columns = before.columns.fork()  # a caller may step from the same state more than once
            columns.extend(torch.ones(slots.shape[:2], dtype=torch.bool, device=x.device))

            def attend(slot: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
                return attend_frames(slot, q, *columns.update(k, v, slot), mask)

            out = self.core(slots, shared, attend, depth)
            count = min(self.window - 1, episodes.shape[1])  # frames in the window of the next one, which counts itself
            newest = columns.crop(columns.length - count * x.shape[2], columns.length)
            latest = FrameCache(newest, episodes[:, episodes.shape[1] - count :])
        return DynamicsOutput(out.h.view_as(x), latest, out.loops[:, None].expand(-1, x.shape[1]))

    def step(self, x: Tensor, positions: Tensor, first: Tensor, depth: int, state: FrameCache) -> DynamicsOutput:
        """Run one step. x: (B, N, D), positions: (B, N, P), first: (B,); h and loops have no T."""
        out = self(x[:, None], positions[:, None], first[:, None], depth, state)
        return DynamicsOutput(out.h[:, 0], out.state, out.loops[:, 0])

    def _mask(self, episodes: Tensor, steps: int, slots: int) -> Tensor:
        """Return the attention mask of the last `steps` frames, bool (B, 1, steps * slots, S)."""
        frames = torch.arange(episodes.shape[1], device=episodes.device)
        queries = frames[-steps:, None]
        near = (frames <= queries) & (frames > queries - self.window)  # the window counts the frame itself
        # Frames of other episodes are masked; padding frames have NO_EPISODE, which no query has.
        visible = near & (episodes[:, -steps:, None] == episodes[:, None])
        return visible.repeat_interleave(slots, 1).repeat_interleave(slots, 2)[:, None]


def episodes_of(first: Tensor, before: Tensor) -> Tensor:
    """Return the episode number of each frame, (B, frames), those `before` included; never NO_EPISODE."""
    # Numbers count up from 0; the clamp is for padding, NO_EPISODE.
    last = before[:, -1:].clamp(min=0) if before.shape[1] else torch.zeros_like(first[:, :1], dtype=torch.long)
    return torch.cat((before, last + first.long().cumsum(1)), 1)


@dataclass(frozen=True)
class BlockCausal:
    """Attention of frames of `slots` queries whose keys are the last columns, under a mask (B, 1, L, S).

    Keys after a query's own frame are left out rather than masked, which halves the work. Small frames share a call.
    """

    slots: int

    def __call__(self, slot: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        dtype = v.dtype
        if q.device.type == "cpu":  # half-precision attention is slower than float32 on CPUs
            q, k, v = q.float(), k.float(), v.float()
        length, before, width = q.shape[2], k.shape[2] - q.shape[2], self.slots * max(2, COLUMNS_AT_ONCE // self.slots)
        parts = []
        with torch.autocast("cpu", enabled=False):  # it would cast the float32 copies back
            for start in range(0, length, width):
                stop = min(start + width, length)
                visible = before + stop  # up to the last frame of this call
                rows = mask[:, :, start:stop, :visible]
                parts.append(
                    F.scaled_dot_product_attention(q[:, :, start:stop], k[:, :, :visible], v[:, :, :visible], rows)
                )
        return torch.cat(parts, 2).transpose(1, 2).flatten(2).to(dtype)
