"""Decoders as typed configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from loopwm.pixel.twisted.decoding import (
    Argmax,
    Copy,
    Decoder,
    ExactAssignment,
    Sample,
    Sinkhorn,
    Solver,
    Sticky,
    Transport,
    centre_region,
)


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder by name, and the prices of those that have them."""

    kind: Literal["sample", "argmax", "copy", "sticky", "transport"]
    c_d: float = 0.0
    c_w: float = 0.0
    solver: Literal["exact", "sinkhorn"] = "exact"
    epsilon: float = 1e-5
    iterations: int = 10

    def decoder(self, grid: tuple[int, int], region: Tensor) -> Decoder:
        """region: bool (L,), where transport decides."""
        match self.kind:
            case "sample":
                return Sample()
            case "argmax":
                return Argmax()
            case "copy":
                return Copy()
            case "sticky":
                return Sticky(self.c_w)
        solver: Solver = ExactAssignment() if self.solver == "exact" else Sinkhorn(self.epsilon, self.iterations)
        return Transport(grid, self.c_d, self.c_w, solver, region)


@dataclass(frozen=True)
class Centre:
    """Where transport decides, and what a centre-exact frame must get right: the grid without its edge and without
    what stands below the map."""

    edge: int = 0
    bottom_rows: int = 0

    def region(self, grid: tuple[int, int]) -> Tensor:
        return centre_region(grid, self.edge, self.bottom_rows)
