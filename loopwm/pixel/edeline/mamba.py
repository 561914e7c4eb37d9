"""Selective state spaces (Mamba; Gu and Dao 2023, section 3), plainly written: the memory that EDELINE's paper has.

    u, z   = W_in norm(x)                    u by a causal convolution over four steps, then SiLU
    s_t    = exp(Delta_t A) s_{t-1} + Delta_t B_t u_t        Delta, B and C are read from u_t
    y_t    = C_t s_t + D u_t
    out    = x + W_out (y * SiLU(z))

A loop over steps in the place of the published kernel, which wants a GPU: the same numbers, slower.

Shape suffixes: B batch, T environment steps, D width, E = 2 D inner width, N numbers of a state for each of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.pixel.dynamics import Depth, DynamicsOutput

EXPAND, STATE, TAPS = 2, 16, 4
SLOWEST, FASTEST = 1e-3, 1e-1
"""Delta at first, log-uniform between them."""


class MambaLayer(nn.Module):
    """A residual layer, (B, T, D) in and out, as the module's equations have it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        inner, self.rank = EXPAND * dim, math.ceil(dim / 16)
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.inwards = nn.Linear(dim, 2 * inner, bias=False)
        self.taps = nn.Parameter(torch.empty(TAPS, inner).uniform_(-(TAPS**-0.5), TAPS**-0.5))
        """By how many steps ago."""
        self.tap_bias = nn.Parameter(torch.zeros(inner))
        self.read = nn.Linear(inner, self.rank + 2 * STATE, bias=False)
        self.delta = nn.Linear(self.rank, inner)
        self.log_a = nn.Parameter(torch.arange(1.0, STATE + 1).log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        self.outwards = nn.Linear(inner, dim, bias=False)
        begun = (torch.rand(inner) * math.log(FASTEST / SLOWEST) + math.log(SLOWEST)).exp()
        with torch.no_grad():
            self.delta.bias.copy_(begun + (-torch.expm1(-begun)).log())  # its softplus is `begun`

    def forward(self, x: Tensor, age: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, T, D) and what is left, from state (B, TAPS - 1 + STATE, E): inputs before, then s. age: int (B, T),
        steps of the episode before each, at least TAPS where it began before the first."""
        u, z = self.inwards(self.norm(x)).chunk(2, -1)
        before = torch.cat((state[:, : TAPS - 1], u), 1)
        u = F.silu(self._convolved(before, age))
        low, b, c = self.read(u).split((self.rank, STATE, STATE), -1)
        delta = F.softplus(self.delta(low))
        kept = (delta[..., None] * -self.log_a.exp()).exp() * (age > 0)[..., None, None]
        new = (delta * u)[..., None] * b[..., None, :]
        s, reached = state[:, TAPS - 1 :].mT, []
        for decay, brought in zip(kept.unbind(1), new.unbind(1), strict=True):
            s = torch.addcmul(brought, decay, s)
            reached.append(s)
        y = (torch.stack(reached, 1) @ c[..., None])[..., 0] + self.skip * u
        recent = before[:, -(TAPS - 1) :]
        lag = torch.arange(TAPS - 2, -1, -1, device=x.device)
        recent = recent * (age[:, -1:] >= lag)[..., None]
        return x + self.outwards(y * F.silu(z)), torch.cat((recent, s.mT), 1)

    def _convolved(self, before: Tensor, age: Tensor) -> Tensor:
        """(B, T, E) of the inputs (B, TAPS - 1 + T, E): each step with those of its episode up to TAPS - 1 ago."""
        steps = age.shape[1]
        terms = [
            self.taps[lag] * before[:, TAPS - 1 - lag : TAPS - 1 - lag + steps] * (age >= lag)[..., None]
            for lag in range(TAPS)
        ]
        return torch.stack(terms).sum(0) + self.tap_bias


class Mamba(nn.Module):
    """Layers of it as `Dynamics` of frames of one slot; depth decides nothing. Its state is (B, layers * (TAPS - 1 +
    STATE), E)."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.inner = EXPAND * dim
        self.layers = nn.ModuleList(MambaLayer(dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)

    def initial(self, batch: int, device: torch.device) -> Tensor:
        return torch.zeros(batch, len(self.layers) * (TAPS - 1 + STATE), self.inner, device=device)

    def forward(
        self, x: Tensor, positions: Tensor, first: Tensor, depth: Depth, state: Tensor | None = None
    ) -> DynamicsOutput[Tensor]:
        """As in `Dynamics`."""
        state = self.initial(len(x), x.device) if state is None else state
        steps = torch.arange(x.shape[1], device=x.device)
        begun = torch.where(first, steps, -TAPS).cummax(1).values
        h, after = x[:, :, 0], []
        for layer, own in zip(self.layers, state.chunk(len(self.layers), 1), strict=True):
            h, left = layer(h, steps - begun, own)
            after.append(left)
        return DynamicsOutput(self.norm(h)[:, :, None], torch.cat(after, 1), torch.ones_like(first, dtype=torch.long))

    def step(self, x: Tensor, positions: Tensor, first: Tensor, depth: Depth, state: Tensor) -> DynamicsOutput[Tensor]:
        out = self(x[:, None], positions[:, None], first[:, None], depth, state)
        return DynamicsOutput(out.h[:, 0], out.state, out.loops[:, 0])
