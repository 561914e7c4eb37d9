"""State retention and input injection: h' = A_bar * h + B_bar e.

A_bar = exp(-dt * exp(a)) is the zero-order hold of the continuous-time diagonal A = -exp(a) (LoopWM, equations for
A and A_bar; Parcae). B_bar = dt * B is the Euler step the paper prints; `zoh` takes the exact one instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MIN_DECAY, MAX_DECAY = 1e-4, 20.0
"""Bounds of dt * exp(a): in float32 both exp(-1e-4) < 1 and exp(-20) > 0 hold strictly."""

INITIAL_RETENTION = math.sqrt(1 / 5)


class StateInjection(nn.Module):
    """Diagonal contractive retention with a full input matrix.

    The parameters are `a` (D,), `b` (D,) with dt = softplus(b), and `B` (D, D). None of them takes weight decay.
    """

    def __init__(self, dim: int, zoh: bool = False) -> None:
        super().__init__()
        self.zoh = zoh
        self.a = nn.Parameter(torch.empty(dim))
        self.b = nn.Parameter(torch.empty(dim))
        self.B = nn.Linear(dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """a = 0, b so that A_bar = sqrt(1/5), B = identity (Parcae)."""
        dt = -math.log(INITIAL_RETENTION)
        nn.init.zeros_(self.a)
        nn.init.constant_(self.b, math.log(math.expm1(dt)))
        identity_(self.B.weight)

    def decay(self) -> Tensor:
        """dt * exp(a) in float32, clamped: (D,). Its negative is the exponent of A_bar."""
        return (F.softplus(self.b.float()) * self.a.float().exp()).clamp(MIN_DECAY, MAX_DECAY)

    def retention(self) -> Tensor:
        """A_bar: (D,) float32, every entry strictly inside (0, 1) for any value of the parameters."""
        return torch.exp(-self.decay())

    def drive(self, e_BLD: Tensor) -> Tensor:
        """B_bar e: (B, L, D). It does not change over the loops of a pass, so it is computed once."""
        if self.zoh:
            gain = -torch.expm1(-self.decay()) * torch.exp(-self.a.float())
        else:
            gain = F.softplus(self.b.float())
        return gain.to(e_BLD.dtype) * self.B(e_BLD)


@torch.no_grad()
def identity_(matrix: Tensor) -> None:
    """Fills a square matrix with the identity. `nn.init.eye_` fails on parameters that are on the meta device."""
    matrix.zero_()
    matrix.fill_diagonal_(1.0)
