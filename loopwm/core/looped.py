"""LoopedCore: prelude -> looped block -> coda. The only place that iterates the block.

    e        = RMSNorm(prelude(x))                       x: (B, L, D)
    h^(0)    = truncated noise in training, zeros otherwise, or what the caller carries over
    h^(t+1)  = block(A_bar * h^(t) + B_bar e)            the same block in every loop
    out      = coda(C h^(T))

With h' = A_bar h + B_bar e the residual form h' + residuals(h') is the paper's A_bar h + B_bar e + R(h, e).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loopwm.core.block import Attend, AttentionInputs, Block, RMSNorm
from loopwm.core.depth import DepthPlan
from loopwm.core.injection import StateInjection, identity_


@dataclass(frozen=True)
class CoreConfig:
    """Sizes of a core. Slots number the attention calls of the deepest pass."""

    dim: int
    heads: int
    head_dim: int
    mlp_dim: int
    prelude_layers: int
    block_layers: int
    coda_layers: int
    max_loops: int
    norm_eps: float
    zoh: bool

    def prelude_slot(self, layer: int) -> int:
        return layer

    def coda_slot(self, layer: int) -> int:
        return self.prelude_layers + layer

    @property
    def copy_slot(self) -> int:
        """Reserved for the copy attention of text models."""
        return self.prelude_layers + self.coda_layers

    def loop_slot(self, loop: int, layer: int) -> int:
        return self.copy_slot + 1 + loop * self.block_layers + layer

    @property
    def num_slots(self) -> int:
        return self.loop_slot(self.max_loops, 0)


@dataclass(frozen=True)
class CoreOutput:
    """h: (B, L, D) coda output. state: (B, L, D) h^(T) in float32. previous_state: h^(T-1)."""

    h: Tensor
    state: Tensor
    previous_state: Tensor


class LoopedCore(nn.Module):
    def __init__(self, config: CoreConfig) -> None:
        super().__init__()
        self.config = config
        self.prelude = self._layers(config.prelude_layers)
        self.input_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.injection = StateInjection(config.dim, config.zoh)
        self.block = self._layers(config.block_layers)
        self.C = nn.Linear(config.dim, config.dim, bias=False)
        self.coda = self._layers(config.coda_layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.injection.reset_parameters()
        for layer in (*self.prelude, *self.block, *self.coda):
            layer.reset_parameters()
        nn.init.ones_(self.input_norm.weight)
        identity_(self.C.weight)

    def _layers(self, count: int) -> nn.ModuleList:
        c = self.config
        return nn.ModuleList(Block(c.dim, c.heads, c.head_dim, c.mlp_dim, c.norm_eps) for _ in range(count))

    def forward(
        self, x_BLD: Tensor, shared: AttentionInputs, attend: Attend, depth: int, initial_BLD: Tensor | None = None
    ) -> CoreOutput:
        """Every row loops `depth` times from `initial_BLD`, None for zeros; x_BLD: (B, L, D).

        Raises ValueError if depth is not in [1, max_loops].
        """
        if not 1 <= depth <= self.config.max_loops:
            raise ValueError(f"depth: {depth} loops, expected 1 to max_loops = {self.config.max_loops}")
        drive, retention = self._drive(x_BLD, shared, attend)
        h = previous = torch.zeros_like(drive, dtype=torch.float32) if initial_BLD is None else initial_BLD
        for loop in range(depth):
            previous, h = h, self._loop(h, drive, retention, shared, attend, loop)
        return self._finish(h, previous, shared, attend, x_BLD.dtype)

    def forward_sampled(
        self,
        x_BLD: Tensor,
        shared: AttentionInputs,
        attend: Attend,
        plan: DepthPlan,
        initial_BLD: Tensor | None = None,
    ) -> CoreOutput:
        """Training: each row has its own depth, and only the last min(T_i, mu_bwd) loops carry gradients.

        The first state is `initial_BLD`, None for the plan's noise; no gradient reaches what it was made from.

        All rows finish together, so the loops without gradients come first and hold only the rows that are deep
        enough to need them: the cost follows the mean depth and no row is computed in vain.
        """
        drive, retention = self._drive(x_BLD, shared, attend)
        if initial_BLD is None:
            initial_BLD = plan.initial_state(x_BLD.shape[1], x_BLD.shape[2], x_BLD.device)
        h = previous = initial_BLD.detach()
        for remaining in range(plan.longest, 0, -1):
            rows = plan.rows_at(remaining, x_BLD.device)
            loop = plan.longest - remaining
            with torch.set_grad_enabled(torch.is_grad_enabled() and remaining <= plan.mu_bwd):
                previous, h = h, self._loop_rows(h, drive, retention, shared, attend, loop, rows)
        return self._finish(h, previous, shared, attend, x_BLD.dtype)

    def encode_input(self, x_BLD: Tensor, shared: AttentionInputs, attend: Attend) -> Tensor:
        """e = RMSNorm(prelude(x)): (B, L, D)."""
        for index, layer in enumerate(self.prelude):
            x_BLD = layer(x_BLD, shared, attend, self.config.prelude_slot(index))
        return self.input_norm(x_BLD)

    def _drive(self, x_BLD: Tensor, shared: AttentionInputs, attend: Attend) -> tuple[Tensor, Tensor]:
        """B_bar e (B, L, D) and A_bar (D,): what stays fixed over the loops of a pass."""
        e_BLD = self.encode_input(x_BLD, shared, attend)
        return self.injection.drive(e_BLD).to(x_BLD.dtype), self.injection.retention()

    def _loop(
        self, h: Tensor, drive: Tensor, retention: Tensor, shared: AttentionInputs, attend: Attend, loop: int
    ) -> Tensor:
        # The state stays in float32: in half precision an A_bar close to 1 would round to 1.
        h = retention * h + drive
        for index, layer in enumerate(self.block):
            h = layer(h.to(drive.dtype), shared, attend, self.config.loop_slot(loop, index))
        return h.float()

    def _loop_rows(
        self,
        h: Tensor,
        drive: Tensor,
        retention: Tensor,
        shared: AttentionInputs,
        attend: Attend,
        loop: int,
        rows: Tensor,
    ) -> Tensor:
        if len(rows) == len(h):
            return self._loop(h, drive, retention, shared, attend, loop)
        updated = self._loop(h[rows], drive[rows], retention, shared.select(rows), attend, loop)
        return h.index_copy(0, rows, updated)

    def _finish(
        self, h: Tensor, previous: Tensor, shared: AttentionInputs, attend: Attend, dtype: torch.dtype
    ) -> CoreOutput:
        out = self.C(h.to(dtype)).to(dtype)
        for index, layer in enumerate(self.coda):
            out = layer(out, shared, attend, self.config.coda_slot(index))
        return CoreOutput(out, h, previous)
