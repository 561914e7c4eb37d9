"""Typed configuration of an agent trained in a world model (TWISTED, tables 7, 8, 11 and 12).

The sections `model`, `objective` and `sampling` are its system's; others, such as `policy`, its learner's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from loopwm.pixel.registry import AGENTS, LEARNERS, named
from loopwm.pixel.replay import RewardUnit
from loopwm.pixel.system import system_class, with_sections
from loopwm.records.config import check_numbers, typed
from loopwm.records.errors import InputError


@dataclass(frozen=True)
class RealConfig:
    """Settings of real play."""

    environment: str = "crafter"
    count: int = 48
    """Parallel environments."""
    steps: int = 96
    """Steps of each environment per iteration."""
    total: int = 1_000_000
    """T_total: interactions of the run."""
    epochs: int = 4
    minibatches: int = 8
    rewards: RewardUnit = "raw"
    """Reward for learner, world and the log of returns: the simulator's, or its sign."""


@dataclass(frozen=True)
class WorldConfig:
    """World-model training per iteration."""

    updates: int = 500
    """U_WM; 0 trains no model: the learner uses real play only, or the unchanged model of `start_from`."""
    start_from: str = ""
    """Checkpoint of this system, model and objective to start from, if any."""
    rows: int = 48
    steps: int = 20
    """T_WM, steps of a segment."""
    minibatches: int = 3
    """Optimiser steps per update, each on a part of the rows."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    clip_norm: float = 0.5
    replay: int = 128_000
    """Capacity of the replay in transitions."""
    recency: tuple[float, ...] = ()
    """Shares of the rows by age, for equally large parts of the replay, oldest first; empty: uniform.

    EDELINE's published code has 0.1, 0.1, 0.1, 0.7.
    """
    demonstrations: str = ""
    """Folder of recorded episodes at the beginning of the replay (STORM, table 10), if any."""
    warmup: int = 0
    """Interactions before the first update: the replay must contain a segment of `steps`."""


@dataclass(frozen=True)
class ImaginationConfig:
    """Learner training in imagined worlds per iteration. Of PPO alone: epochs, minibatches, entropy_coef."""

    updates: int = 300
    """U_imag, updates per iteration."""
    warmup: int = 50_000
    """T_warmup: interactions before the first update."""
    count: int = 48
    """Parallel worlds."""
    steps: int = 20
    burn_in: int = 5
    """T_burn: real frames that warm up the policy's memory."""
    epochs: int = 1
    minibatches: int = 1
    entropy_coef: float = 0.01


@dataclass(frozen=True)
class AgentRunConfig:
    seed: int = 0
    save_every: int = 5
    """Iterations between checkpoints."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if available."""


POSITIVE = {
    "real": ("count", "steps", "total", "epochs", "minibatches"),
    "world": ("rows", "steps", "minibatches", "learning_rate", "clip_norm", "replay"),
    "imagination": ("count", "steps", "burn_in", "epochs", "minibatches"),
    "run": ("save_every",),
}
"""Keys whose values must be above zero, by section; other numbers of the section must not be below it."""


@dataclass(frozen=True)
class AgentConfig:
    """Configuration of an agent's run. Raises InputError if a value is out of range."""

    system: str = "twisted-agent"
    learner: str = "ppo"
    model: Any = None
    objective: Any = None
    sampling: Any = None
    real: RealConfig = field(default_factory=RealConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    imagination: ImaginationConfig = field(default_factory=ImaginationConfig)
    run: AgentRunConfig = field(default_factory=AgentRunConfig)

    def __post_init__(self) -> None:
        check_numbers(self, POSITIVE)
        shares = self.world.recency
        if shares and (min(shares) < 0 or abs(sum(shares) - 1) > 1e-6):
            raise InputError(f"world.recency: must be shares that sum to 1, got {shares}")
        rows_of = {"real": self.real.count, "world": self.world.rows, "imagination": self.imagination.count}
        for section, rows in rows_of.items():
            parts = getattr(self, section).minibatches
            if parts > rows:
                raise InputError(f"{section}.minibatches: must be at most {rows} rows, got {parts}")

    @property
    def of_system(self) -> str:
        return AGENTS[self.system]

    @property
    def has_world(self) -> bool:
        return bool(self.world.updates or self.world.start_from)


def agent_config(sections: dict[str, Any]) -> AgentConfig:
    """Build the configuration with the sections of its system and learner. Raises InputError naming a key at fault."""
    name = sections.get("system", AgentConfig.system)
    if name not in AGENTS:
        raise InputError(f"system: must be one of {', '.join(AGENTS)}, got {name!r}")
    kind, learner = system_class(AGENTS[name]), named(LEARNERS, sections.get("learner", AgentConfig.learner), "learner")
    of_system = {"model": kind.Model, "objective": kind.Objective, "sampling": kind.Sampling}
    return typed(with_sections(AgentConfig, of_system | dict(learner.sections)), sections)
