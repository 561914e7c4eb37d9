"""TWISTED on the looped core: patch tokens and the action are slots of a frame; the next frame is decoded in one pass.

    slots of frame t    s_t^1 .. s_t^L, a_t
    slot i <= L         predicts s_{t+1}^i over the codebook
    slot L + 1          predicts reward r_t and done d_t

Departures from the paper: the looped core instead of three GPT-2 blocks (so RMSNorm, squared ReLU, no dropout); reward
classes are any listed values, not two.

Shape suffixes: B batch, T environment steps, L patch tokens, N = L + 1 slots, K codes, D width, P coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from loopwm.pixel.dynamics import (
    Depth,
    DynamicsOutput,
    FrameCache,
    LoopedAttention,
    LoopedConfig,
    require_at_least,
    space_time_axes,
)


@dataclass(frozen=True)
class TwistedConfig(LoopedConfig):
    """Sizes of a model; defaults are the paper's where it gives them (TWISTED, table 7)."""

    codes: int = 4096
    """K, the capacity of the codebook."""
    rewards: tuple[float, ...] = (0.0, 1.0)
    """Reward classes; a reward counts as the nearest."""
    dim: int = 128
    mlp_dim: int = 512
    coda_layers: int = 1
    mu_rec: float = 3.0
    default_depth: int = 3
    max_loops: int = 8
    window: int = 20
    """T_WM: attention window in frames."""
    patch: tuple[int, ...] = (7, 7)
    """Height and width."""
    threshold: float = 0.75
    """tau, squared distance of pixels in [0, 1] beyond which a patch becomes a code."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "codes", "window")
        if len(set(self.rewards)) < 2:
            raise ValueError(f"rewards: must contain two different values, got {self.rewards}")
        if len(self.patch) != 2:
            raise ValueError(f"patch: must be a height and a width, got {self.patch}")


class TokenBatch(NamedTuple):
    """Consecutive replayed steps. tokens and next_tokens: (B, T, L); all others: (B, T)."""

    tokens: Tensor
    next_tokens: Tensor
    action: Tensor
    reward: Tensor
    terminated: Tensor
    first: Tensor


class Logits(NamedTuple):
    """Logits. tokens: (B, T, L, K); reward: (B, T, number of rewards); done: (B, T)."""

    tokens: Tensor
    reward: Tensor
    done: Tensor


@dataclass(frozen=True)
class TwistedState:
    """State of imagined rows: KV cache, current tokens (B, L), and the number of frames before them (B,)."""

    cache: FrameCache
    tokens: Tensor
    frames: Tensor
    first: Tensor


class Twisted(nn.Module):
    """Embeddings, dynamics and heads."""

    rewards: Tensor

    def __init__(self, config: TwistedConfig, grid: tuple[int, int], actions: int) -> None:
        """Create the network. grid: rows and columns of a frame's patches. Raises ValueError if sizes do not fit."""
        super().__init__()
        self.config = config
        self.grid = grid
        self.tokens = grid[0] * grid[1]
        self.token_embedding = nn.Embedding(config.codes, config.dim)
        self.action_embedding = nn.Embedding(actions, config.dim)
        self.place_embedding = nn.Embedding(self.tokens, config.dim)
        self.dynamics = LoopedAttention(config.core(), config.window, space_time_axes(config.dim // config.heads))
        self.norm = nn.RMSNorm(config.dim)
        self.token_head = _head(config.dim, config.codes)
        self.reward_head = _head(config.dim, len(config.rewards))
        self.done_head = _head(config.dim, 1)
        self.register_buffer("rewards", torch.tensor(config.rewards), persistent=False)  # `config` has them
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=config.dim**-0.5)

    def forward(self, tokens: Tensor, action: Tensor, first: Tensor, depth: Depth) -> tuple[Logits, DynamicsOutput]:
        """Run the network from an empty state. tokens: (B, T, L), action and first: (B, T)."""
        x, positions = self.embed(tokens, action), self.positions(torch.zeros_like(action[:, 0]), action.shape[1])
        out = self.dynamics(x, positions, first, depth)
        return self.read(out.h), out

    def embed(self, tokens: Tensor, action: Tensor) -> Tensor:
        """Embed tokens (..., L) and action (...) as slots (..., N, D).

        Each token gets a learned embedding of its place (TWISTED, section 3.1).
        """
        state = self.token_embedding(tokens) + self.place_embedding.weight
        return torch.cat((state, self.action_embedding(action)[..., None, :]), -2)

    def positions(self, start: Tensor, steps: int) -> Tensor:
        """Return the positions (B, steps, N, P) of frames start (B,) .. start + steps - 1.

        State tokens are at (x + t, y + t, 2t), the action at (t, t, 2t + 1), so that they stay neighbours (TWISTED,
        appendix C).
        """
        t = start[:, None] + torch.arange(steps, device=start.device)
        slots = torch.arange(self.tokens + 1, device=start.device)
        is_action, columns = slots == self.tokens, self.grid[1]
        x = torch.where(is_action, 0, slots % columns)
        y = torch.where(is_action, 0, slots // columns)
        t = t[..., None]
        return torch.stack((x + t, y + t, 2 * t + is_action.long()), -1)

    def read(self, h: Tensor) -> Logits:
        """Apply the heads to h (..., N, D); logits have no N."""
        h = self.norm(h)
        return Logits(
            self.token_head(h[..., :-1, :]), self.reward_head(h[..., -1, :]), self.done_head(h[..., -1, :])[..., 0]
        )

    def reward_class(self, reward: Tensor) -> Tensor:
        """Return the index of the nearest reward class, int64 of the same shape."""
        return (reward[..., None] - self.rewards).abs().argmin(-1)

    def observe(self, tokens: Tensor, action: Tensor, first: Tensor, depth: int) -> TwistedState:
        """Return the state after real frames.

        tokens: (B, T, L); action: actions between the frames, (B, T - 1); first: bool (B, T), True where an episode
        begins; depth: loops of every pass.
        """
        batch, steps = first.shape
        cache, frames = self.dynamics.initial(batch, tokens.device), torch.zeros_like(tokens[:, 0, 0])
        if steps > 1:
            positions = self.positions(frames, steps - 1)
            cache = self.dynamics(self.embed(tokens[:, :-1], action), positions, first[:, :-1], depth, cache).state
        return TwistedState(cache, tokens[:, -1], frames + steps - 1, first[:, -1])

    def step(self, at: TwistedState, action: Tensor, depth: int) -> tuple[Logits, FrameCache]:
        """Predict the result of action (B,): logits without T, and the KV cache after it."""
        positions = self.positions(at.frames, 1)[:, 0]
        out = self.dynamics.step(self.embed(at.tokens, action), positions, at.first, depth, at.cache)
        return self.read(out.h), out.state


def _head(dim: int, out: int) -> nn.Sequential:
    """Create a head: 128-dimensional linear layer, ReLU, linear layer (TWISTED, appendix B.2)."""
    return nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, out))
