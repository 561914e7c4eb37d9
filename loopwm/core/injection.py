"""State retention and input injection: h' = A_bar * h + B_bar e.

A_bar = exp(-dt * exp(a)) is the zero-order hold of the continuous-time diagonal A = -exp(a) (LoopWM, equations 6
and 7; Parcae, section 4.1). B_bar = dt * B is the Euler step that both papers print.
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
    """Retain the state by a contractive diagonal and inject e through a full matrix.

    The parameters are `a` (D,), `b` (D,) with dt = softplus(b), and `B` (D, D). `loopwm.trainer` decays none.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(dim))
        self.b = nn.Parameter(torch.empty(dim))
        self.B = nn.Linear(dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set a = 0, b so that A_bar = sqrt(1/5), B = identity (Parcae)."""
        dt = -math.log(INITIAL_RETENTION)
        nn.init.zeros_(self.a)
        nn.init.constant_(self.b, math.log(math.expm1(dt)))
        identity_(self.B.weight)

    def decay(self) -> Tensor:
        """Return dt * exp(a) = -dt * A, clamped, (D,) float32 (LoopWM, equation 6).

        Its negative is the exponent of A_bar.

        Computed from logarithms, since dt may underflow while exp(a) overflows.
        """
        b = self.b.float()
        # softplus(b) underflows to 0 in float32 below about -17 (half precision earlier); its logarithm is b there.
        log_dt = torch.where(b < -15, b, F.softplus(b.clamp(min=-15)).log())
        # Clamped in the log domain, before exp can overflow; the bounds keep A_bar inside (0, 1) in float32.
        return (self.a.float() + log_dt).clamp(math.log(MIN_DECAY), math.log(MAX_DECAY)).exp()

    def retention(self) -> Tensor:
        """Return A_bar, (D,) float32 (LoopWM, equation 7).

        Every entry is strictly inside (0, 1) for any finite parameters.
        """
        return torch.exp(-self.decay())

    def drive(self, e_BLD: Tensor) -> Tensor:
        """Return B_bar e, (B, L, D), with B_bar = dt * B (LoopWM, section 3.2).

        Constant over the loops of a pass, so callers compute it once.
        """
        # dt in float32: bfloat16 keeps 8 bits of a value that scales every loop.
        return F.softplus(self.b.float()).to(e_BLD.dtype) * self.B(e_BLD)


class FreeInjection(StateInjection):
    """Inject without the spectral constraint, for comparison: `a` itself is the diagonal A_bar and may leave (0, 1)."""

    def reset_parameters(self) -> None:
        """Set the same initial retention as `StateInjection`."""
        super().reset_parameters()
        nn.init.constant_(self.a, INITIAL_RETENTION)

    def retention(self) -> Tensor:
        """Return A_bar, (D,) float32."""
        return self.a.float()


@torch.no_grad()
def identity_(matrix: Tensor) -> None:
    """Fill a square matrix with the identity. `nn.init.eye_` fails for parameters on the meta device."""
    matrix.zero_()
    matrix.fill_diagonal_(1.0)
