"""TWISTED on the looped core: patch tokens and the action as slots of a frame, the next frame decoded all at once.

    slots of frame t    s_t^1 .. s_t^L, a_t
    slot i <= L         predicts s_{t+1}^i over the codebook
    slot L + 1          predicts reward r_t and done d_t

Departures from the paper: the looped core in place of three GPT-2 blocks (so RMSNorm, squared ReLU, no dropout);
rewards are any listed values, not two.

Shape suffixes: B batch, T environment steps, L patch tokens, N = L + 1 slots, K codes, D width, P coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from loopwm.core import CoreConfig, ExitRule
from loopwm.pixel.dynamics import (
    Depth,
    DynamicsOutput,
    FrameCache,
    LoopedAttention,
    LoopedConfig,
    require_positive_sizes,
)
from loopwm.pixel.positions import Rotary, Rotary1D, Rotary3D


@dataclass(frozen=True)
class TwistedConfig(LoopedConfig):
    """Sizes of a model. Defaults are the paper's where it has one (TWISTED, table 7)."""

    codes: int = 4096
    """K, the capacity of the codebook."""
    rewards: tuple[float, ...] = (0.0, 1.0)
    """The values that rewards are told apart by: each counts as the nearest."""
    dim: int = 128
    mlp_dim: int = 512
    coda_layers: int = 1
    mu_rec: float = 3.0
    default_depth: int = 3
    max_loops: int = 8
    window: int = 20
    """T_WM: frames that attention sees."""
    spatial_rotary: bool = True
    """Rotary positions over (x, y, t) instead of the place in the sequence."""
    absolute_positions: bool = True
    """A learned embedding of (x, y) on every state token."""
    exit_gate: bool = False
    patch: tuple[int, ...] = (7, 7)
    """Height and width."""
    threshold: float = 0.75
    """tau, squared distance of pixels in [0, 1] beyond which a patch is a code of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive_sizes(self, "codes", "window")
        if len(set(self.rewards)) < 2:
            raise ValueError(f"rewards: {self.rewards} holds no two values to tell apart")
        if len(self.patch) != 2:
            raise ValueError(f"patch: {self.patch} is not a height and a width")

    def core(self) -> CoreConfig:
        return replace(super().core(), exit_gate=self.exit_gate)

    def rotary(self) -> Rotary:
        head_dim = self.dim // self.heads
        return Rotary3D(head_dim) if self.spatial_rotary else Rotary1D(head_dim)


class TokenBatch(NamedTuple):
    """Consecutive steps of replayed play: tokens and next_tokens (B, T, L), all else (B, T)."""

    tokens: Tensor
    next_tokens: Tensor
    action: Tensor
    reward: Tensor
    terminated: Tensor
    first: Tensor


class Logits(NamedTuple):
    """tokens: (B, T, L, K), reward: (B, T, number of rewards), done: (B, T)."""

    tokens: Tensor
    reward: Tensor
    done: Tensor


@dataclass(frozen=True)
class Imagining:
    """Where an imagined row stands: the core's state, the tokens (B, L) seen last and the frames so far (B,)."""

    cache: FrameCache
    tokens: Tensor
    frames: Tensor
    first: Tensor

    def replace(self, rows: Tensor, fresh: Imagining) -> Imagining:
        """The same with rows int64 (R,) taken from `fresh`, which has R of them in that order."""
        order = torch.arange(len(self.tokens), device=rows.device)
        order[rows] = len(self.tokens) + torch.arange(len(rows), device=rows.device)
        both = (
            torch.cat((ours, theirs))[order]
            for ours, theirs in ((self.tokens, fresh.tokens), (self.frames, fresh.frames), (self.first, fresh.first))
        )
        return Imagining(self.cache.join(fresh.cache).select(order), *both)


class Twisted(nn.Module):
    """Embeddings, dynamics and heads."""

    rewards: Tensor

    def __init__(self, config: TwistedConfig, grid: tuple[int, int], actions: int) -> None:
        """grid: rows and columns of a frame's patches. Raises ValueError for sizes that do not fit together."""
        super().__init__()
        self.config = config
        self.grid = grid
        self.tokens = grid[0] * grid[1]
        self.token_embedding = nn.Embedding(config.codes, config.dim)
        self.action_embedding = nn.Embedding(actions, config.dim)
        self.place_embedding = nn.Embedding(self.tokens, config.dim) if config.absolute_positions else None
        self.dynamics = LoopedAttention(config.core(), config.rotary(), config.window)
        self.norm = nn.RMSNorm(config.dim)
        self.token_head = _head(config.dim, config.codes)
        self.reward_head = _head(config.dim, len(config.rewards))
        self.done_head = _head(config.dim, 1)
        self.register_buffer("rewards", torch.tensor(config.rewards), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=config.dim**-0.5)

    def forward(
        self, tokens: Tensor, action: Tensor, first: Tensor, depth: Depth
    ) -> tuple[Logits, DynamicsOutput[FrameCache]]:
        """tokens: (B, T, L), action and first: (B, T). The dynamics start empty."""
        x, positions = self.embed(tokens, action), self.positions(torch.zeros_like(action[:, 0]), action.shape[1])
        out = self.dynamics(x, positions, first, depth)
        return self.read(out.h), out

    def embed(self, tokens: Tensor, action: Tensor) -> Tensor:
        """Slots (..., N, D) of frames with tokens (..., L) and action (...); each token takes a learned embedding of
        its place (TWISTED, section 3.1)."""
        state = self.token_embedding(tokens)
        if self.place_embedding is not None:
            state = state + self.place_embedding.weight
        return torch.cat((state, self.action_embedding(action)[..., None, :]), -2)

    def positions(self, start: Tensor, steps: int) -> Tensor:
        """(B, steps, N, P) of frames start (B,) .. start + steps - 1.

        State tokens stand at (x + t, y + t, 2t), the action at (t, t, 2t + 1), so that they stay neighbours (TWISTED,
        appendix C). With one coordinate, at their place in the sequence.
        """
        t = start[:, None] + torch.arange(steps, device=start.device)
        slots = torch.arange(self.tokens + 1, device=start.device)
        if not self.config.spatial_rotary:
            return (t[..., None] * len(slots) + slots)[..., None]
        is_action, columns = slots == self.tokens, self.grid[1]
        x = torch.where(is_action, 0, slots % columns)
        y = torch.where(is_action, 0, slots // columns)
        t = t[..., None]
        return torch.stack((x + t, y + t, 2 * t + is_action.long()), -1)

    def read(self, h: Tensor) -> Logits:
        """h: (..., N, D); each logit comes without N."""
        h = self.norm(h)
        return Logits(
            self.token_head(h[..., :-1, :]), self.reward_head(h[..., -1, :]), self.done_head(h[..., -1, :])[..., 0]
        )

    def reward_class(self, reward: Tensor) -> Tensor:
        """The index of the nearest listed value: int64 of the same shape."""
        return (reward[..., None] - self.rewards).abs().argmin(-1)

    def observe(self, tokens: Tensor, action: Tensor, first: Tensor, depth: int | ExitRule) -> Imagining:
        """Real frames: tokens (B, T, L), first (B, T), and the T - 1 actions between them (B, T - 1)."""
        batch, steps = first.shape
        cache, frames = self.dynamics.initial(batch, tokens.device), torch.zeros_like(tokens[:, 0, 0])
        if steps > 1:
            positions = self.positions(frames, steps - 1)
            cache = self.dynamics(self.embed(tokens[:, :-1], action), positions, first[:, :-1], depth, cache).state
        return Imagining(cache, tokens[:, -1], frames + steps - 1, first[:, -1])

    def step(self, at: Imagining, action: Tensor, depth: int | ExitRule) -> tuple[Logits, FrameCache]:
        """What follows the action (B,): logits without T, and the core's state after it."""
        positions = self.positions(at.frames, 1)[:, 0]
        out = self.dynamics.step(self.embed(at.tokens, action), positions, at.first, depth, at.cache)
        return self.read(out.h), out.state


def _head(dim: int, out: int) -> nn.Sequential:
    """128-dimensional linear layer, ReLU, linear layer (TWISTED, appendix B.2)."""
    return nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, out))
