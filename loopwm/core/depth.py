"""How deep each sequence loops in training, and what of it is back-propagated.

T_i = max(1, Poisson(mu_rec)) for every sequence on its own (LoopWM, "Variable-Depth Training"), cut at `max_loops`;
gradients flow through the last min(T_i, mu_bwd) loops, mu_bwd = ceil(mu_rec / 2).

Depth and initial noise are pure functions of (seed, step, index in the global batch): how many processes share a
batch does not change them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NOISE_CUT = 3.0
"""Standard deviations at which the initial noise is cut."""


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
        """Draws the plan of the rows with these indices in the global batch of optimiser step `step`."""
        loops, noise_seeds = [], []
        for row in rows:
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, step, row))))
            loops.append(min(max(1, int(rng.poisson(mu_rec))), max_loops))
            noise_seeds.append(int(rng.integers(2**63)))
        return cls(tuple(loops), math.ceil(mu_rec / 2), tuple(noise_seeds), places)

    @property
    def longest(self) -> int:
        return max(self.loops)

    @property
    def mean(self) -> float:
        return sum(self.loops) / len(self.loops)

    def rows_at(self, remaining: int, device: torch.device) -> Tensor:
        """Rows that still have at least `remaining` loops to run: int64 (n,).

        Passes are aligned at their last loop, so a shallow row joins late instead of leaving early.
        """
        return torch.tensor([i for i, loops in enumerate(self.loops) if loops >= remaining], device=device)

    def initial_state(self, length: int, dim: int, device: torch.device) -> Tensor:
        """h^(0) ~ N(0, 2 / (5 D)) cut at NOISE_CUT standard deviations: (B, length, dim) float32.

        A row's values for its first positions do not depend on how far the batch pads it.
        """
        rows = torch.empty(len(self.noise_seeds), length, dim, device=device)
        for row, seed in zip(rows, self.noise_seeds, strict=True):
            torch.rand(length, dim, generator=torch.Generator(device=device).manual_seed(seed), out=row)
        # The inverse of the cut distribution function; library routines draw a number of values that depends on length.
        tail = 0.5 * math.erfc(NOISE_CUT / math.sqrt(2))
        quantiles = tail + rows * (1 - 2 * tail)
        noise = math.sqrt(2 / (5 * dim)) * torch.special.ndtri(quantiles)
        return noise if self.places is None else noise.gather(1, self.places[:, :, None].expand(-1, -1, dim))
