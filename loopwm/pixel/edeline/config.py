"""Sizes, loss and sampling of EDELINE. Defaults are the paper's or, where it gives none, the published code's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from loopwm.pixel.dynamics import require_at_least
from loopwm.pixel.edeline.memory import MemoryConfig
from loopwm.pixel.edeline.unet import UNetConfig


@dataclass(frozen=True)
class EdelineConfig:
    """Sizes of EDELINE; defaults are the paper's (EDELINE, table 9)."""

    memory: MemoryConfig = field(default_factory=MemoryConfig)
    unet: UNetConfig = field(default_factory=UNetConfig)
    encoder_channels: tuple[int, ...] = (64, 64, 64, 64)
    """Channels of each level; a level halves the frame."""
    encoder_stem: int = 1
    action_dim: int = 128
    head_hidden: int = 512
    frames: int = 4
    """L: frames that condition the next one."""
    burn_in: int = 4
    """B: steps of a segment before the first predicted frame."""
    rewards: tuple[float, ...] = (-1.0, 0.0, 1.0)
    """Reward classes; a reward counts as the nearest."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "encoder_stem", "action_dim", "head_hidden", "frames")
        if not self.encoder_channels:
            raise ValueError("encoder_channels: must have at least one level")
        if self.frames > self.burn_in:
            raise ValueError(f"frames: must be at most burn_in ({self.burn_in}), got {self.frames}")
        if len(set(self.rewards)) < 2:
            raise ValueError(f"rewards: must contain two different values, got {self.rewards}")


@dataclass(frozen=True)
class EdelineLoss:
    """Noise levels of training (EDELINE, equation 17) and options of the published code, whose defaults these are."""

    noise_mean: float = -0.4
    noise_std: float = 1.2
    """P_mean and P_std of log sigma (EDELINE, equation 17)."""
    sigma_min: float = 0.002
    sigma_max: float = 20.0
    offset_noise: float = 0.3
    """Standard deviation of noise shared by a channel, folded into sigma."""
    own_frame: bool = True
    """Train a second step conditioned on the model's own denoised frame."""
    novelty: float = 0.0
    """Share of targets sampled by distance from the preceding frames; the rest, in the paper all, is uniform.

    An agent that mostly waits produces few frames that differ from the last ones.
    """

    preview: float = 0.0
    """Weight of the linear next-frame reconstruction of every step (`unet.memory_map`), new frames weighted more by
    `novelty`; 0: none, as in the paper.
    """
    contrast: float = 0.0
    """Weight of the contrastive next-frame choice of every step; 0: none, as in the paper."""

    def __post_init__(self) -> None:
        if not 0 <= self.novelty <= 1:
            raise ValueError(f"novelty: must be between 0 and 1, got {self.novelty}")
        require_at_least(0, self, "preview", "contrast")


@dataclass(frozen=True)
class EdelineSampling:
    """Settings of the diffusion sampler."""

    steps: int = 3
    sigma_min: float = 0.002
    sigma_max: float = 5.0
    rho: float = 7.0
    noise: Literal["unit", "sigma_max"] = "unit"
    """Standard deviation of the initial noise: sigma_max, as the process requires, or 1, as in the published code.

    With 1 the second step finds less noise than its noise level states, and samples the mean of several futures more
    often.
    """

    def __post_init__(self) -> None:
        require_at_least(1, self, "steps", "rho")
        if not 0 < self.sigma_min <= self.sigma_max:
            raise ValueError(f"sigma_min: must be between 0 and sigma_max ({self.sigma_max}), got {self.sigma_min}")

    def sigmas(self) -> list[float]:
        """Return the steps + 1 noise levels from the largest to zero, evenly spaced in sigma^(1 / rho)."""
        if self.steps == 1:
            return [self.sigma_max, 0.0]
        most, least = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        return [(most + i / (self.steps - 1) * (least - most)) ** self.rho for i in range(self.steps)] + [0.0]
