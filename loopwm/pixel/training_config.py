"""Typed configuration of a pixel world model's training; the sections `model` and `objective` are its system's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from loopwm.pixel.replay import RewardUnit
from loopwm.pixel.system import system_class, with_sections
from loopwm.records.config import check_numbers, typed
from loopwm.records.errors import InputError
from loopwm.trainer.config import OptimizerConfig, RunConfig


@dataclass(frozen=True)
class FramesConfig:
    """Folders of recorded episodes."""

    train: str = ""
    dev: str = ""
    rewards: RewardUnit = "raw"
    """Reward to learn: the recorded reward, or its sign."""


@dataclass(frozen=True)
class SegmentConfig:
    """Size of a global batch: `micro_batches` times `rows` segments of `steps` frames."""

    rows: int = 8
    steps: int = 20
    micro_batches: int = 1


POSITIVE = {
    "batch": ("rows", "steps", "micro_batches"),
    "optimizer": ("learning_rate", "clip_norm"),
    "run": ("steps", "log_every", "eval_every", "eval_batches", "save_every", "keep_checkpoints"),
}
"""Keys whose values must be above zero, by section; other numbers of the section must not be below it."""


@dataclass(frozen=True)
class PixelTrainingConfig:
    """Configuration of a world-model training run. Raises InputError if a value is out of range."""

    system: str = "twisted"
    model: Any = None
    objective: Any = None
    data: FramesConfig = field(default_factory=FramesConfig)
    batch: SegmentConfig = field(default_factory=SegmentConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if not self.data.train:
            raise InputError("data.train: must be a folder of recorded episodes, got none")
        check_numbers(self, POSITIVE)


def training_config(sections: dict[str, Any]) -> PixelTrainingConfig:
    """Build the configuration with the sections of its system. Raises InputError naming a key at fault."""
    kind = system_class(sections.get("system", PixelTrainingConfig.system))
    config = with_sections(PixelTrainingConfig, {"model": kind.Model, "objective": kind.Objective})
    return typed(config, sections)
