"""How deep each sequence loops in training, and what of it is back-propagated.

T_i = max(1, Poisson(mu_rec)) for every sequence on its own (LoopWM, equation 9; Parcae, section 4.2), cut at
`max_loops`; gradients flow through the last min(T_i, mu_bwd) loops, mu_bwd = ceil(mu_rec / 2).

Other ways to draw are kept to compare with: one depth for a whole micro-batch, as in prior work, and no draw at all.
`mu_rec` may grow over a run (`MeanRamp`).

Depth and initial noise are pure functions of (seed, step, index in the global batch): how many processes share a
batch does not change them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

NOISE_CUT = 3.0
"""Standard deviations at which the initial noise is cut."""


def backward_loops(mu_rec: float) -> int:
    """mu_bwd = ceil(mu_rec / 2) (LoopWM, section 3.3; Parcae, equation 6)."""
    return math.ceil(mu_rec / 2)


def _draw(seed: int, step: int, row: int, mu_rec: float, max_loops: int) -> tuple[int, int]:
    """Depth and noise seed of a row."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, step, row))))
    return min(max(1, int(rng.poisson(mu_rec))), max_loops), int(rng.integers(2**63))


@dataclass(frozen=True)
class DepthPlan:
    """Loops of each row, loops that carry gradients, and the seed of each row's initial noise.

    places: (B, L) index of each column within its row, where padding moves a row's columns about; None where column
    i is the row's i-th. Noise goes by place, so that a row draws the same whatever it is batched with.
    """

    loops: tuple[int, ...]
    mu_bwd: int
    noise_seeds: tuple[int, ...]
    places: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.loops) != len(self.noise_seeds):
            raise ValueError(f"{len(self.loops)} depths but {len(self.noise_seeds)} noise seeds")
        if not self.loops or min(self.loops) < 1 or self.mu_bwd < 1:
            raise ValueError(f"depths and mu_bwd must be at least 1, got {self.loops} and {self.mu_bwd}")

    @classmethod
    def sample(
        cls, seed: int, step: int, rows: Sequence[int], mu_rec: float, max_loops: int, places: Tensor | None = None
    ) -> DepthPlan:
        """A Poisson depth for each of the rows with these indices in the global batch of optimiser step `step` (LoopWM,
        equation 9)."""
        loops, noise_seeds = zip(*(_draw(seed, step, row, mu_rec, max_loops) for row in rows), strict=True)
        return cls(loops, backward_loops(mu_rec), noise_seeds, places)

    @classmethod
    def sample_batch(
        cls, seed: int, step: int, rows: Sequence[int], mu_rec: float, max_loops: int, places: Tensor | None = None
    ) -> DepthPlan:
        """One Poisson depth for all rows of a micro-batch."""
        plan = cls.sample(seed, step, rows, mu_rec, max_loops, places)
        return replace(plan, loops=(plan.loops[0],) * len(rows))

    @classmethod
    def constant(
        cls, seed: int, step: int, rows: Sequence[int], mu_rec: float, max_loops: int, places: Tensor | None = None
    ) -> DepthPlan:
        """Every row loops mu_rec times, rounded."""
        plan = cls.sample(seed, step, rows, mu_rec, max_loops, places)
        return replace(plan, loops=(min(max(1, round(mu_rec)), max_loops),) * len(rows))

    @property
    def longest(self) -> int:
        return max(self.loops)

    def rows_at(self, remaining: int, device: torch.device) -> Tensor:
        """Rows that still have at least `remaining` loops to run: int64 (n,).

        Passes are aligned at their last loop, so a shallow row joins late instead of leaving early.
        """
        return torch.tensor([i for i, loops in enumerate(self.loops) if loops >= remaining], device=device)

    def initial_state(self, length: int, dim: int, device: torch.device) -> Tensor:
        """h^(0) ~ N(0, 2 / (5 D)) cut at NOISE_CUT standard deviations: (B, length, dim) float32.

        LoopWM, section 3.2 leaves the variance open; Parcae, table 18 takes the one that weights start with. A row's
        values for its first positions do not depend on how far the batch pads it.
        """
        rows = torch.empty(len(self.noise_seeds), length, dim, device=device)
        for row, seed in zip(rows, self.noise_seeds, strict=True):
            torch.rand(length, dim, generator=torch.Generator(device=device).manual_seed(seed), out=row)
        # The inverse of the cut distribution function; library routines draw a number of values that depends on length.
        tail = 0.5 * math.erfc(NOISE_CUT / math.sqrt(2))
        quantiles = tail + rows * (1 - 2 * tail)
        noise = math.sqrt(2 / (5 * dim)) * torch.special.ndtri(quantiles)
        return noise if self.places is None else noise.gather(1, self.places[:, :, None].expand(-1, -1, dim))


@dataclass(frozen=True)
class MeanRamp:
    """mu_rec as a function of the optimiser step: linear from `start` to `end` over `steps`, after the first `wait`."""

    start: float
    end: float
    steps: int
    wait: int = 0

    def at(self, step: int) -> float:
        if step < self.wait:
            return self.start
        ramped = step - self.wait
        return self.end if ramped >= self.steps else self.start + (self.end - self.start) * ramped / self.steps
