"""Memory modules that the study of a cue compares with the memory of a pixel world.

All run whole sequences of one episode from an empty state: x (B, T, D) and a depth give h (B, T, D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.pixels.mamba import Mamba
from loopwm.core.block import AttentionInputs, causal_attention
from loopwm.core.depth import DepthPlan
from loopwm.core.injection import identity_
from loopwm.core.looped import LoopedCore
from loopwm.pixel.dynamics import Depth, axial_angles
from loopwm.pixel.edeline.memory import Memory, MemoryConfig

CARRIED = 3.0
"""Initial weight of the carried state against the new frame; with 1 the model forgets before it learns to remember."""


@dataclass(frozen=True)
class ModuleConfig(MemoryConfig):
    """Memory module and its sizes; the loop's sizes apply to the two looped kinds, mamba has one layer for each."""

    kind: Literal["attention", "recurrence", "gru", "lstm", "mamba"] = "attention"
    frames: int = 0
    """Steps that the module sees before and with each one; 0: all."""


class StepCore(LoopedCore):
    """Looped core whose prelude and loops run apart, so that a scan over steps contains the loops only."""

    def run_prelude(self, x: Tensor, at: AttentionInputs) -> Tensor:
        """Return prelude(x), (N, 1, D), which `encode_input` would normalise."""
        for index, layer in enumerate(self.prelude):
            x = layer(x, at, causal_attention, index)
        return x

    def run_loops(self, drive: Tensor, retention: Tensor, at: AttentionInputs, depth: Depth) -> Tensor:
        """Return h^(T), (B, 1, D), as `forward` or, with a plan, `forward_sampled` would for drive B_bar e."""
        h = torch.zeros_like(drive, dtype=torch.float32)
        if not isinstance(depth, DepthPlan):
            for loop in range(depth):
                h = self._loop(h, drive, retention, at, causal_attention, loop)
            return h
        h = depth.initial_state(1, drive.shape[-1], drive.device)
        return self._loop_sampled(h, drive, retention, at, causal_attention, depth)[0]


class Recurrence(nn.Module):
    """Looped recurrence: a step receives the latent of the step before (LoopWM, equation 4: h_{k-1}).

    The latent passes through a linear map that starts as a multiple of the identity.

    Departure: LoopWM gives h_{k-1} to the prelude. Here it is added after the prelude, and the carried state is the one
    before the coda, so prelude and coda run over all steps at once and the scan contains the loops only.
    """

    def __init__(self, config: ModuleConfig) -> None:
        super().__init__()
        self.core = StepCore(config.core())
        self.carry = nn.Linear(config.dim, config.dim, bias=False)
        identity_(self.carry.weight)
        with torch.no_grad():
            self.carry.weight.mul_(CARRIED)

    def forward(self, x: Tensor, depth: Depth) -> Tensor:
        core, rows = self.core, x.flatten(0, 1)[:, None]
        axes = [0] * (core.config.head_dim // 2)
        at = AttentionInputs(*axial_angles(torch.zeros(len(rows), 1, 1, device=x.device), axes))
        p = core.run_prelude(rows, at).unflatten(0, x.shape[:2])
        # B_bar once for all steps, not B_bar e of each.
        step_size = F.softplus(core.injection.b.float())[:, None]
        retention, matrix = core.injection.retention(), (step_size * core.injection.B.weight).to(p.dtype)
        states: list[Tensor] = []
        for t in range(x.shape[1]):
            carried = p[:, t] + self.carry(states[-1].to(p.dtype)) if states else p[:, t]
            drive = F.linear(core.input_norm(carried), matrix)
            states.append(core.run_loops(drive, retention, at, depth))
        read = torch.stack(states, 1).flatten(0, 1)
        return core.read_out(read, at, causal_attention, x.dtype).view_as(x)


class MemoryModule(nn.Module):
    """Module of any kind."""

    def __init__(self, config: ModuleConfig) -> None:
        super().__init__()
        self.config = config
        self.module: nn.Module = _module(config)

    def forward(self, x: Tensor, depth: Depth) -> Tensor:
        if not self.config.frames:
            return self._run(x, depth)
        width, (batch, steps, _) = self.config.frames, x.shape
        # Right-align each step's window: what is before the first step must not be seen, so shorter ones run apart.
        outputs = [self._run(x[:, max(0, t + 1 - width) : t + 1], depth)[:, -1] for t in range(steps)]
        return torch.stack(outputs, 1).view(batch, steps, -1)

    def _run(self, x: Tensor, depth: Depth) -> Tensor:
        match self.module:
            case Memory():
                h: Tensor = self.module(x, torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device), depth).h
                return h
            case Recurrence():
                return self.module(x, depth)
            case nn.GRU() | nn.LSTM():
                return self.module(x)[0]
        return self.module(x)


def _module(config: ModuleConfig) -> nn.Module:
    match config.kind:
        case "attention":
            return Memory(config)
        case "recurrence":
            return Recurrence(config)
        case "gru":
            return nn.GRU(config.dim, config.dim, batch_first=True)
        case "lstm":
            return nn.LSTM(config.dim, config.dim, batch_first=True)
        case "mamba":
            return Mamba(config.dim, config.prelude_layers + config.block_layers + config.coda_layers)
