"""A small core of random weights, and what it is run on."""

from __future__ import annotations

import torch

from loopwm.core.block import AttentionInputs, rotary_angles
from loopwm.core.looped import CoreConfig, LoopedCore

THETA = 10000.0


CONFIG = CoreConfig(
    dim=8,
    heads=2,
    head_dim=4,
    mlp_dim=12,
    prelude_layers=1,
    block_layers=2,
    coda_layers=1,
    max_loops=6,
    norm_eps=1e-6,
)


def random_core(config: CoreConfig = CONFIG, seed: int = 0) -> LoopedCore:
    """A core in float64 whose weights are all random, the zero-initialised ones too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        core = LoopedCore(config).double()
        for parameter in core.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return core


def shared_inputs(batch: int, length: int, config: CoreConfig = CONFIG) -> AttentionInputs:
    positions = torch.arange(length).expand(batch, length)
    return AttentionInputs(*rotary_angles(positions, config.head_dim, THETA))


def random_input(batch: int, length: int, config: CoreConfig = CONFIG) -> torch.Tensor:
    return torch.randn(batch, length, config.dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
