"""Decoders that the study of exact frames compares with the product's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lab.pixels.sinkhorn import Sinkhorn
from loopwm.pixel.twisted.decoding import (
    WILDCARD,
    Decoder,
    DecoderConfig,
    ExactAssignment,
    NoisedTransport,
    Solver,
    check_penalty,
    sample,
)


@dataclass(frozen=True)
class Argmax:
    """Choose the most probable token."""

    def __call__(self, p: Tensor, previous: Tensor, generator: torch.Generator) -> Tensor:
        return p.argmax(-1)


@dataclass(frozen=True)
class Copy:
    """Repeat the previous frame."""

    def __call__(self, p: Tensor, previous: Tensor, generator: torch.Generator) -> Tensor:
        return previous


@dataclass(frozen=True)
class Sticky:
    """Keep the old token if its probability is within c_w of the largest, else sample.

    This is `Transport`, solved exactly, wherever c_d > c_w, as at the paper's printed values.
    """

    c_w: float

    def __post_init__(self) -> None:
        check_penalty("c_w", self.c_w)

    def __call__(self, p: Tensor, previous: Tensor, generator: torch.Generator) -> Tensor:
        p = p.float()
        sticks = p.gather(-1, previous[..., None])[..., 0] >= p.amax(-1) - self.c_w
        return torch.where(sticks, previous, sample(p, generator))


@dataclass(frozen=True, eq=False)
class Transport(NoisedTransport):
    """Transport of the paper (TWISTED, equations 1 to 4), without noise; tokens that are not copied are sampled.

    A copy from another place needs c_d * distance < c_w. At the printed values (0.6, 0.3; MinAtar 0.2, 0.05) there is
    none, and with `ExactAssignment` this equals `Sticky(c_w)` token for token; (0.05, 0.6) does move tokens.
    """

    def __call__(self, p: Tensor, previous: Tensor, generator: torch.Generator) -> Tensor:
        sources = self.sources(p, previous)
        copied = previous.gather(1, sources.clamp(min=0))
        return torch.where(sources == WILDCARD, sample(p, generator), copied)


@dataclass(frozen=True)
class StudyDecoderConfig(DecoderConfig):
    """Decoder by name, with those of the study."""

    kind: Literal["sample", "argmax", "copy", "sticky", "transport", "noised-transport"]  # type: ignore[assignment]
    solver: Literal["exact", "sinkhorn"] = "exact"
    epsilon: float = 1e-5
    iterations: int = 10
    threshold: float = 0.0
    relative: bool = False
    """Options of `Sinkhorn`."""

    def decoder(self, grid: tuple[int, int], region: Tensor) -> Decoder:
        match self.kind:
            case "argmax":
                return Argmax()
            case "copy":
                return Copy()
            case "sticky":
                return Sticky(self.c_w)
            case "transport":
                return Transport(grid, self.c_d, self.c_w, self.assignment(), region)
            case "noised-transport":
                return NoisedTransport(grid, self.c_d, self.c_w, self.assignment(), region)
        return super().decoder(grid, region)

    def assignment(self) -> Solver:
        """Create the solver."""
        if self.solver == "exact":
            return ExactAssignment()
        return Sinkhorn(self.epsilon, self.iterations, self.threshold, self.relative)
