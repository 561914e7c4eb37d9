"""Typed configuration of an agent that learns in TWISTED's imagination (TWISTED, tables 7, 8, 11 and 12)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from loopwm.pixel.policy import PolicyConfig
from loopwm.pixel.ppo import PPOConfig
from loopwm.pixel.twisted.decoder_config import Centre, DecoderConfig
from loopwm.pixel.twisted.model import TwistedConfig
from loopwm.pixel.twisted.training_config import CoefficientConfig
from loopwm.records.config import require_positive
from loopwm.records.errors import InputError


@dataclass(frozen=True)
class RealConfig:
    """Play in the real environment."""

    environment: str = "crafter"
    count: int = 48
    """Environments at once."""
    steps: int = 96
    """Of each environment in an iteration."""
    total: int = 1_000_000
    """T_total: interactions until the run ends."""
    epochs: int = 4
    minibatches: int = 8


@dataclass(frozen=True)
class WorldConfig:
    """The world model's training in an iteration."""

    updates: int = 500
    """U_WM; 0 learns no model: PPO on the real play alone."""
    rows: int = 48
    steps: int = 20
    """T_WM."""
    minibatches: int = 3
    learning_rate: float = 1e-3
    clip_norm: float = 0.5
    patch: tuple[int, ...] = (7, 7)
    threshold: float = 0.75
    replay: int = 128_000
    """Transitions kept."""


@dataclass(frozen=True)
class ImaginationConfig:
    """The policy's training in imagined worlds in an iteration."""

    updates: int = 300
    """U_imag."""
    warmup: int = 50_000
    """T_warmup: interactions before the first of them."""
    count: int = 48
    """Worlds at once."""
    steps: int = 20
    burn_in: int = 5
    """T_burn: real frames that the policy's memory is warmed up on."""
    epochs: int = 1
    minibatches: int = 1
    entropy_coef: float = 0.01
    decoder: DecoderConfig = field(default_factory=lambda: DecoderConfig("transport", c_d=0.6, c_w=0.3))
    centre: Centre = field(default_factory=Centre)


@dataclass(frozen=True)
class AgentRunConfig:
    seed: int = 0
    save_every: int = 5
    """Iterations between checkpoints."""


POSITIVE = {
    "real": ("count", "steps", "total", "epochs", "minibatches"),
    "world": ("rows", "steps", "minibatches", "learning_rate", "clip_norm", "replay"),
    "imagination": ("count", "steps", "burn_in", "epochs", "minibatches"),
    "run": ("save_every",),
}
"""Keys whose values must be above zero."""


@dataclass(frozen=True)
class AgentConfig:
    """Raises InputError for values out of range."""

    system: Literal["twisted-agent"] = "twisted-agent"
    model: TwistedConfig = field(default_factory=TwistedConfig)
    objective: CoefficientConfig = field(default_factory=CoefficientConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    real: RealConfig = field(default_factory=RealConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    imagination: ImaginationConfig = field(default_factory=ImaginationConfig)
    run: AgentRunConfig = field(default_factory=AgentRunConfig)

    def __post_init__(self) -> None:
        require_positive(self, POSITIVE)
        rows_of = {"real": self.real.count, "world": self.world.rows, "imagination": self.imagination.count}
        for section, rows in rows_of.items():
            parts = getattr(self, section).minibatches
            if parts > rows:
                raise InputError(f"{section}.minibatches: {parts} are more than {rows} rows")
        if self.imagination.updates and not self.world.updates:
            raise InputError("imagination.updates: there is no world without world.updates")
