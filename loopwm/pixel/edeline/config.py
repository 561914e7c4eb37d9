"""Sizes, loss and sampling of EDELINE: defaults are the paper's and, where that is silent, the published code's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from loopwm.pixel.edeline.memory import MemoryConfig
from loopwm.pixel.edeline.unet import UNetConfig


@dataclass(frozen=True)
class EdelineConfig:
    """Defaults are the paper's (EDELINE, table 9)."""

    memory: MemoryConfig = field(default_factory=MemoryConfig)
    unet: UNetConfig = field(default_factory=UNetConfig)
    encoder_channels: tuple[int, ...] = (64, 64, 64, 64)
    """Of each level, which halves the frame."""
    encoder_stem: int = 1
    action_dim: int = 128
    head_hidden: int = 512
    frames: int = 4
    """L: frames that the next one is drawn after."""
    burn_in: int = 4
    """B: steps of a segment before the first that is drawn."""
    rewards: tuple[float, ...] = (-1.0, 0.0, 1.0)
    """The values that rewards are told apart by: each counts as the nearest."""
    predict: Literal["diffusion", "regression"] = "diffusion"
    """diffusion, or regression: the mean frame in one step, to compare with."""

    def __post_init__(self) -> None:
        for name in ("encoder_stem", "action_dim", "head_hidden", "frames"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")
        if self.frames > self.burn_in:
            raise ValueError(f"frames: {self.frames} are more than burn_in, {self.burn_in}")
        if len(set(self.rewards)) < 2:
            raise ValueError(f"rewards: {self.rewards} holds no two values to tell apart")

    @property
    def mu_rec(self) -> float:
        return self.memory.mu_rec

    @property
    def default_depth(self) -> int:
        return self.memory.default_depth

    @property
    def max_loops(self) -> int:
        return self.memory.max_loops


@dataclass(frozen=True)
class EdelineLoss:
    """Noise levels of training (EDELINE, equation 17), and what the published code adds: defaults are its."""

    noise_mean: float = -0.4
    noise_std: float = 1.2
    """P_mean and P_std of log sigma (EDELINE, equation 17)."""
    sigma_min: float = 0.002
    sigma_max: float = 20.0
    offset_noise: float = 0.3
    """Deviation of noise that a channel has in common, folded into sigma."""
    own_frame: bool = True
    """A second step is trained behind the model's own denoised frame."""
    harmonise: bool = True
    targets: int = 1
    """Frames of a row that are predicted, drawn independently: the memory of the row is computed once for all."""
    novelty: float = 0.0
    """Share of them that is drawn by how far they are from each of the frames before; the rest, as in the paper all,
    is drawn evenly. Where an agent mostly waits, few frames show anything that the last ones do not."""

    preview: float = 0.0
    """Weight of a linear picture of every step's next frame out of the memory laid out (`unet.memory_map`); 0: none, as
    in the paper. All steps then teach the memory what comes, not the few whose frame is drawn; new ones more, by
    `novelty`."""
    contrast: float = 0.0
    """Weight of telling every step's next frame from the other frames of the batch; 0: none, as in the paper."""

    def __post_init__(self) -> None:
        if not 0 <= self.novelty <= 1:
            raise ValueError(f"novelty: {self.novelty} is not within 0 and 1")
        for name in ("preview", "contrast"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is below zero")
        if self.targets < 1:
            raise ValueError(f"targets: {self.targets} is below 1")


@dataclass(frozen=True)
class EdelineSampling:
    """How a frame is drawn."""

    steps: int = 3
    sigma_min: float = 0.002
    sigma_max: float = 5.0
    rho: float = 7.0
    noise: Literal["unit", "sigma_max"] = "unit"
    """Deviation of the noise that a frame is drawn from: sigma_max, as the process has it, or 1, as the published code
    has it. The second step then finds less noise than it is told of, and draws the mean of what may come more often."""
    rounded: bool = True
    """Each denoised frame is cut to what a frame can show, and rounded to its 255 levels."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: {self.steps} is below 1")
        if not 0 < self.sigma_min <= self.sigma_max:
            raise ValueError(f"sigma_min: {self.sigma_min} is not within 0 and sigma_max, {self.sigma_max}")

    @property
    def deviation(self) -> float:
        """Of the noise that a frame is drawn from."""
        return self.sigma_max if self.noise == "sigma_max" else 1.0

    def sigmas(self) -> list[float]:
        """From the largest to zero: steps + 1 levels, evenly spaced in sigma^(1 / rho)."""
        if self.steps == 1:
            return [self.sigma_max, 0.0]
        most, least = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        return [(most + i / (self.steps - 1) * (least - most)) ** self.rho for i in range(self.steps)] + [0.0]
