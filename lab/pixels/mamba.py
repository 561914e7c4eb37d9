"""Mamba (Gu and Dao 2023, section 3) in plain PyTorch, the memory of EDELINE's paper.

    u, z   = W_in norm(x)                    u by a causal convolution over four steps, then SiLU
    s_t    = exp(Delta_t A) s_{t-1} + Delta_t B_t u_t        Delta, B and C are projections of u_t
    y_t    = C_t s_t + D u_t
    out    = x + W_out (y * SiLU(z))

A loop over steps replaces the published kernel, which needs a GPU: the same numbers, slower.

Shape suffixes: B batch, T environment steps, D width, E = 2 D inner width, N state size per channel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EXPAND, STATE, TAPS = 2, 16, 4
SLOWEST, FASTEST = 1e-3, 1e-1
"""Range of the initial Delta, log-uniform."""


class MambaLayer(nn.Module):
    """Residual layer (B, T, D) -> (B, T, D) by the module's equations."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        inner, self.rank = EXPAND * dim, math.ceil(dim / 16)
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.inwards = nn.Linear(dim, 2 * inner, bias=False)
        self.taps = nn.Parameter(torch.empty(TAPS, inner).uniform_(-(TAPS**-0.5), TAPS**-0.5))
        """Convolution weights by lag."""
        self.tap_bias = nn.Parameter(torch.zeros(inner))
        self.read = nn.Linear(inner, self.rank + 2 * STATE, bias=False)
        self.delta = nn.Linear(self.rank, inner)
        self.log_a = nn.Parameter(torch.arange(1.0, STATE + 1).log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        self.outwards = nn.Linear(inner, dim, bias=False)
        delta = (torch.rand(inner) * math.log(FASTEST / SLOWEST) + math.log(SLOWEST)).exp()
        with torch.no_grad():
            self.delta.bias.copy_(delta + (-torch.expm1(-delta)).log())  # inverse of softplus

    def forward(self, x: Tensor, age: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (B, T, D) and the state after the last step.

        Args:
            x: inputs (B, T, D)
            age: steps since the episode's beginning, int (B, T); at least TAPS where it began before the first step
            state: (B, TAPS - 1 + STATE, E), the last convolution inputs, then s
        """
        u, z = self.inwards(self.norm(x)).chunk(2, -1)
        before = torch.cat((state[:, : TAPS - 1], u), 1)
        u = F.silu(self._convolved(before, age))
        low, b, c = self.read(u).split((self.rank, STATE, STATE), -1)
        delta = F.softplus(self.delta(low))
        # The state of the previous episode must not leak: its decay is 0 at an episode's first step.
        decay = (delta[..., None] * -self.log_a.exp()).exp() * (age > 0)[..., None, None]
        new = (delta * u)[..., None] * b[..., None, :]
        s, states = state[:, TAPS - 1 :].mT, []
        for factor, increment in zip(decay.unbind(1), new.unbind(1), strict=True):
            s = torch.addcmul(increment, factor, s)
            states.append(s)
        y = (torch.stack(states, 1) @ c[..., None])[..., 0] + self.skip * u
        recent = before[:, -(TAPS - 1) :]
        lag = torch.arange(TAPS - 2, -1, -1, device=x.device)
        recent = recent * (age[:, -1:] >= lag)[..., None]
        return x + self.outwards(y * F.silu(z)), torch.cat((recent, s.mT), 1)

    def _convolved(self, before: Tensor, age: Tensor) -> Tensor:
        """Convolve the inputs (B, TAPS - 1 + T, E) causally within each episode: (B, T, E)."""
        steps = age.shape[1]
        terms = [
            self.taps[lag] * before[:, TAPS - 1 - lag : TAPS - 1 - lag + steps] * (age >= lag)[..., None]
            for lag in range(TAPS)
        ]
        return torch.stack(terms).sum(0) + self.tap_bias


class Mamba(nn.Module):
    """Stack of Mamba layers, run from an empty state on one episode: (B, T, D) -> (B, T, D)."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.inner = EXPAND * dim
        self.layers = nn.ModuleList(MambaLayer(dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        age = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        empty = torch.zeros(len(x), TAPS - 1 + STATE, self.inner, device=x.device)
        for layer in self.layers:
            x, _ = layer(x, age, empty)
        return self.norm(x)
