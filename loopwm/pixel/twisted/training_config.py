"""Typed configuration of TWISTED's training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from loopwm.pixel.twisted.model import TwistedConfig
from loopwm.records.config import require_positive
from loopwm.records.errors import InputError
from loopwm.trainer.config import OptimizerConfig, RunConfig


@dataclass(frozen=True)
class FramesConfig:
    """Recorded episodes, and how their frames become tokens."""

    train: str = ""
    dev: str = ""
    patch: tuple[int, ...] = (7, 7)
    """Height and width."""
    threshold: float = 0.75
    """tau, squared distance of pixels in [0, 1] beyond which a patch is a code of its own."""


@dataclass(frozen=True)
class SegmentConfig:
    """A global batch is `micro_batches` times `rows` segments of `steps` frames."""

    rows: int = 8
    steps: int = 20
    micro_batches: int = 1


@dataclass(frozen=True)
class CoefficientConfig:
    reward_coef: float = 1.0
    done_coef: float = 1.0


@dataclass(frozen=True)
class TwistedDepthConfig:
    backward_loops: int = 0
    """mu_bwd, the last loops that carry gradients; 0: ceil(mu_rec / 2)."""


POSITIVE = {
    "batch": ("rows", "steps", "micro_batches"),
    "optimizer": ("learning_rate", "clip_norm"),
    "run": ("steps", "log_every", "eval_every", "eval_batches", "save_every", "keep_checkpoints"),
}
"""Keys whose values must be above zero."""


@dataclass(frozen=True)
class TwistedTrainingConfig:
    """Raises InputError for values out of range."""

    system: Literal["twisted"] = "twisted"
    model: TwistedConfig = field(default_factory=TwistedConfig)
    data: FramesConfig = field(default_factory=FramesConfig)
    batch: SegmentConfig = field(default_factory=SegmentConfig)
    objective: CoefficientConfig = field(default_factory=CoefficientConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    depth: TwistedDepthConfig = field(default_factory=TwistedDepthConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if not self.data.train:
            raise InputError("data.train: a folder of recorded episodes is needed")
        require_positive(self, POSITIVE)
