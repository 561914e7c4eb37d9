"""Looped core: prelude -> looped block -> coda. The only place that iterates the block.

    e        = RMSNorm(prelude(x))                       x: (B, L, D)
    h^(0)    = truncated noise in training, zeros otherwise, or the caller's state
    h^(t+1)  = block(A_bar * h^(t) + B_bar e)            the same block in every loop
    out      = coda(C h^(T))

The first and the last two lines are LoopWM, equations 4, 5 and 8, and together Parcae, equation 3. With
h' = A_bar h + B_bar e the residual form h' + residuals(h') is the papers' A_bar h + B_bar e + R(h, e).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loopwm.core.block import Attend, AttentionInputs, Block, RMSNorm
from loopwm.core.depth import DepthPlan
from loopwm.core.exit_rules import ExitGate, ExitRule, Fixed, LoopView, as_rule
from loopwm.core.injection import FreeInjection, StateInjection, identity_


@dataclass(frozen=True)
class CoreConfig:
    """Sizes of a core. Slots number the attention calls of the deepest pass.

    input_norm (RMSNorm on e) is off in adopted decoders, spectral_constraint (A_bar inside (0, 1)) in comparisons only.
    """

    dim: int
    heads: int
    head_dim: int
    mlp_dim: int
    prelude_layers: int
    block_layers: int
    coda_layers: int
    max_loops: int
    norm_eps: float
    input_norm: bool = True
    spectral_constraint: bool = True
    exit_gate: bool = False
    state_norm: bool = False
    """Normalise the state at the end of every loop, h^(t+1) = RMSNorm(block(..)), to the size of e."""
    sandwich_norms: bool = False
    """Normalise the outputs of attention and MLP in looped layers before they are added (Huginn, arXiv:2502.05171)."""
    kv_heads: int = 0
    """Heads of keys and values, a divisor of `heads`; 0 for the same number."""
    qk_norm: bool = True
    swiglu: bool = False
    """Layers of adopted decoders may differ in both."""

    @property
    def copy_slot(self) -> int:
        """Slot of the copy attention in text models."""
        return self.prelude_layers + self.coda_layers

    def loop_slot(self, loop: int, layer: int) -> int:
        return self.copy_slot + 1 + loop * self.block_layers + layer

    @property
    def loop_slots(self) -> tuple[tuple[int, ...], ...]:
        """Slots of each layer of the block, first loop first."""
        loops = range(self.max_loops)
        return tuple(tuple(self.loop_slot(loop, layer) for loop in loops) for layer in range(self.block_layers))

    @property
    def num_slots(self) -> int:
        return self.loop_slot(self.max_loops, 0)


@dataclass(frozen=True)
class CoreOutput:
    """h: (B, L, D) coda output. state: (B, L, D) h^(T) in float32. previous_state: h^(T-1). loops: (B,) int64 T."""

    h: Tensor
    state: Tensor
    previous_state: Tensor
    loops: Tensor


class LoopedCore(nn.Module):
    def __init__(self, config: CoreConfig) -> None:
        super().__init__()
        self.config = config
        self.prelude = self._layers(config.prelude_layers)
        self.input_norm = RMSNorm(config.dim, eps=config.norm_eps) if config.input_norm else nn.Identity()
        self.injection = StateInjection(config.dim) if config.spectral_constraint else FreeInjection(config.dim)
        self.block = self._layers(config.block_layers, config.sandwich_norms)
        self.state_norm = RMSNorm(config.dim, eps=config.norm_eps) if config.state_norm else None
        self.C = nn.Linear(config.dim, config.dim, bias=False)
        self.coda = self._layers(config.coda_layers)
        self.gate = ExitGate(config.dim) if config.exit_gate else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.injection.reset_parameters()
        for layer in (*self.prelude, *self.block, *self.coda):
            layer.reset_parameters()
        if isinstance(self.input_norm, RMSNorm):
            nn.init.ones_(self.input_norm.weight)
        identity_(self.C.weight)
        if self.state_norm is not None:
            nn.init.ones_(self.state_norm.weight)
        if self.gate is not None:
            self.gate.reset_parameters()

    def _layers(self, count: int, sandwich: bool = False) -> nn.ModuleList:
        c = self.config
        sizes = (c.dim, c.heads, c.kv_heads or c.heads, c.head_dim, c.mlp_dim, c.norm_eps)
        return nn.ModuleList(Block(*sizes, sandwich, c.qk_norm, c.swiglu) for _ in range(count))

    def check(self, depth: int | ExitRule) -> ExitRule:
        """Convert `depth` to an exit rule and validate it.

        Raises ValueError for what is no rule, a limit outside [1, max_loops], or a gate rule for a core without a gate.
        """
        rule = as_rule(depth)
        if not 1 <= rule.limit <= self.config.max_loops:
            raise ValueError(f"depth: must be 1 to max_loops = {self.config.max_loops}, got {rule.limit} loops")
        if rule.needs_gate and self.gate is None:
            raise ValueError(f"depth: {type(rule).__name__} needs an exit gate, which this model lacks")
        return rule

    def forward(
        self,
        x_BLD: Tensor,
        shared: AttentionInputs,
        attend: Attend,
        depth: int | ExitRule,
        exit_columns: int = 1,
        initial_BLD: Tensor | None = None,
    ) -> CoreOutput:
        """Loop each row until the rule ends it; then run the coda.

        A row exits with all its columns, by one decision over its last `exit_columns`. Its state is fixed from then on,
        but it is computed until the last row exits: a pass costs as much as its deepest row. Its keys and values in
        deeper slots are void; `KVCache.finish` replaces them.

        Args:
            x_BLD: input of the prelude.
            shared: rotary angles and mask of all layers.
            attend: attention, by slot.
            depth: number of loops or exit rule.
            exit_columns: columns pooled for an exit decision.
            initial_BLD: h^(0); None for zeros.

        Raises ValueError as `check`, before anything is computed.
        """
        rule = self.check(depth)
        drive, retention = self._drive(x_BLD, shared, attend)
        h = previous = torch.zeros_like(drive, dtype=torch.float32) if initial_BLD is None else initial_BLD
        if isinstance(rule, Fixed):
            # No branch may depend on data here: serving engines capture this path as a graph.
            for loop in range(rule.loops):
                previous, h = h, self._loop(h, drive, retention, shared, attend, loop)
            loops = torch.full((len(h),), rule.loops, device=h.device)
        else:
            h, previous, loops = self._loop_until_exit(
                h, lambda h, loop: self._loop(h, drive, retention, shared, attend, loop), rule, exit_columns
            )
        return CoreOutput(self.read_out(h, shared, attend, x_BLD.dtype), h, previous, loops)

    def read_out(self, h_BLD: Tensor, shared: AttentionInputs, attend: Attend, dtype: torch.dtype) -> Tensor:
        """Return coda(C h), (B, L, D) in `dtype` (LoopWM, equation 8)."""
        # The second cast undoes autocast, which may return another dtype than the coda runs in.
        out = self.C(h_BLD.to(dtype)).to(dtype)
        for slot, layer in enumerate(self.coda, start=self.config.prelude_layers):  # after the slots of the prelude
            out = layer(out, shared, attend, slot)
        return out

    def forward_sampled(
        self, x_BLD: Tensor, shared: AttentionInputs, attend: Attend, plan: DepthPlan, initial_BLD: Tensor | None = None
    ) -> CoreOutput:
        """Run a training pass: a depth per row, gradients through the last min(T_i, mu_bwd) loops only.

        All rows end together. The loops without gradients come first and hold only the rows deep enough to need them,
        so the cost follows the mean depth. LoopWM, section 3.3; Parcae, algorithm 2. Arguments as of `forward`, but a
        plan in place of the depth; initial_BLD: None for the plan's noise.
        """
        drive, retention = self._drive(x_BLD, shared, attend)
        if initial_BLD is None:
            initial_BLD = plan.initial_state(x_BLD.shape[1], x_BLD.shape[2], x_BLD.device)
        # Detached: back-propagation is truncated to mu_bwd loops, so no gradient may pass h^(0).
        h, previous = self._loop_sampled(initial_BLD.detach(), drive, retention, shared, attend, plan)
        loops = torch.tensor(plan.loops, device=h.device)
        return CoreOutput(self.read_out(h, shared, attend, x_BLD.dtype), h, previous, loops)

    def encode_input(self, x_BLD: Tensor, shared: AttentionInputs, attend: Attend) -> Tensor:
        """Return e = RMSNorm(prelude(x)), (B, L, D) (LoopWM, equation 4)."""
        for index, layer in enumerate(self.prelude):
            x_BLD = layer(x_BLD, shared, attend, index)  # the prelude has the first slots
        return self.input_norm(x_BLD)

    def _drive(self, x_BLD: Tensor, shared: AttentionInputs, attend: Attend) -> tuple[Tensor, Tensor]:
        """Return B_bar e (B, L, D) and A_bar (D,), which are constant over the loops of a pass."""
        e_BLD = self.encode_input(x_BLD, shared, attend)
        return self.injection.drive(e_BLD).to(x_BLD.dtype), self.injection.retention()

    def _loop(
        self, h: Tensor, drive: Tensor, retention: Tensor, shared: AttentionInputs, attend: Attend, loop: int
    ) -> Tensor:
        """Return block(A_bar h + B_bar e), (B, L, D) float32 (LoopWM, equation 5)."""
        # The state stays in float32: in half precision an A_bar close to 1 would round to 1.
        h = retention * h + drive
        for index, layer in enumerate(self.block):
            h = layer(h.to(drive.dtype), shared, attend, self.config.loop_slot(loop, index))
        return h.float() if self.state_norm is None else self.state_norm(h).float()

    def _loop_sampled(
        self, h: Tensor, drive: Tensor, retention: Tensor, shared: AttentionInputs, attend: Attend, plan: DepthPlan
    ) -> tuple[Tensor, Tensor]:
        """Return h^(T) and h^(T-1) for rows that end together, each after its own loops."""
        # Count down: rows are aligned at their last loop, so the gradient-carrying loops are the last for every row.
        for remaining in range(plan.longest, 0, -1):
            rows, loop = plan.rows_at(remaining, drive.device), plan.longest - remaining
            previous = h
            with torch.set_grad_enabled(torch.is_grad_enabled() and remaining <= plan.mu_bwd):
                if len(rows) == len(h):  # the common case: spares three gathers
                    h = self._loop(h, drive, retention, shared, attend, loop)
                else:  # only rows that still loop are computed, so the cost follows the mean depth
                    updated = self._loop(h[rows], drive[rows], retention, shared.select(rows), attend, loop)
                    h = h.index_copy(0, rows, updated)
        return h, previous

    def _loop_until_exit(
        self, h: Tensor, run: Callable[[Tensor, int], Tensor], rule: ExitRule, exit_columns: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return h^(T), h^(T-1) and T for rows that exit one by one. `run` returns the state after a loop."""
        previous, going = h, torch.ones(len(h), dtype=torch.bool, device=h.device)
        loops = going.long() * rule.limit
        states, gates = [_pooled(h, exit_columns)], []
        for loop in range(rule.limit):
            updated = run(h, loop)
            # `where`, not indexing: a row that exited keeps its exact state while others loop on.
            stays = going[:, None, None]
            previous, h = torch.where(stays, h, previous), torch.where(stays, updated, h)
            states.append(_pooled(h, exit_columns))
            if rule.needs_gate and self.gate is not None:
                gates.append(self.gate(states[-1]).sigmoid())
            leaving = going & rule.exits(LoopView(loop + 1, states, torch.stack(gates, 1) if gates else None))
            loops = loops.where(~leaving, loop + 1)
            going = going & ~leaving
            if not going.any():  # waits for the device, once a loop
                break
        return h, previous, loops


def _pooled(h_BLD: Tensor, columns: int) -> Tensor:
    return h_BLD[:, -columns:].mean(1)
