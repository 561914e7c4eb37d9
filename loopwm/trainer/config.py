"""Configuration sections of every system's run: optimiser, length, logging and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimiser: Muon for the matrices inside the core and AdamW for everything else, or AdamW for all."""

    name: Literal["muon", "adamw"] = "muon"
    learning_rate: float = 5e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    clip_norm: float = 1.0
    warmup_steps: int = 50
    decay_share: float = 0.4
    """Share of the steps, at the end, over which the rate falls linearly to zero. 0: constant to the end, so that
    another run can continue or cool down (`--start-from`).
    """
    average: float = 0.0
    """Decay of an exponential average of the weights, which is evaluated and exported in their place. 0: no average."""


@dataclass(frozen=True)
class RunConfig:
    """Length, logging and checkpoints of a run."""

    steps: int = 1000
    minutes: float = 0.0
    """Train for so long in place of `steps`, for machines lent by time: the learning rate falls by the clock."""
    seed: int = 0
    mixed_precision: Literal["no", "bf16", "auto"] = "bf16"
    """auto: the one in which a layer is faster on this processor, measured when the run starts or resumes."""
    compile_layers: bool = False
    """Compile layers if there is a C++ compiler: half a minute more at the start, less for every step
    (docs/results.md).
    """
    activation_checkpointing: bool = False
    """Recompute activations of layers in the backward pass: less memory, more products (docs/scaling.md)."""
    log_every: int = 10
    eval_every: int = 200
    eval_batches: int = 8
    """Evaluation batches, each of as many rows as a training step."""
    save_every: int = 100
    keep_checkpoints: int = 2
