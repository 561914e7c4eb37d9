"""Loop depth in training: depth per sequence, and the loops that are back-propagated.

T_i = max(1, Poisson(mu_rec)) for every sequence on its own (LoopWM, equation 9; Parcae, section 4.2), cut at
`max_loops`; gradients flow through the last min(T_i, mu_bwd) loops, mu_bwd = ceil(mu_rec / 2).

Two other samplers exist for comparison: one depth for a whole micro-batch, as in prior work, and a constant.
`mu_rec` may grow over a run (`ramped_mean`).

Depth and initial noise are pure functions of (seed, step, index in the global batch), so the number of processes does
not change them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

NOISE_CUT = 3.0
"""Standard deviations at which the initial noise is truncated."""


def backward_loops(mu_rec: float) -> int:
    """Return mu_bwd = ceil(mu_rec / 2) (LoopWM, section 3.3; Parcae, equation 6)."""
    return math.ceil(mu_rec / 2)


def _draw(seed: int, step: int, row: int, mu_rec: float, max_loops: int) -> tuple[int, int]:
    """Draw the depth and the noise seed of a row. A mean of 1, as before a ramp, is one loop."""
    # Philox, a counter-based generator: streams of neighbouring seeds are independent.
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, step, row))))
    depth, noise_seed = int(rng.poisson(mu_rec)), int(rng.integers(2**63))
    return min(max(1, depth), max_loops) if mu_rec > 1 else 1, noise_seed


@dataclass(frozen=True)
class DepthPlan:
    """Loops of each row, loops that carry gradients, and the seed of each row's initial noise.

    places: (B, L) index of each column within its row if padding moves columns, else None. Noise is drawn by this
    index, so that a row draws the same values in any batch.
    """

    loops: tuple[int, ...]
    mu_bwd: int
    noise_seeds: tuple[int, ...]
    places: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.loops) != len(self.noise_seeds):
            raise ValueError(f"noise_seeds: must be {len(self.loops)}, one a depth, got {len(self.noise_seeds)}")
        if not self.loops or min(self.loops) < 1 or self.mu_bwd < 1:
            raise ValueError(f"loops, mu_bwd: must be at least 1, got {self.loops}, {self.mu_bwd}")

    @classmethod
    def sample(
        cls,
        seed: int,
        step: int,
        rows: Sequence[int],
        mu_rec: float,
        max_loops: int,
        places: Tensor | None = None,
        sampling: Literal["per_sequence", "per_batch", "fixed"] = "per_sequence",
    ) -> DepthPlan:
        """Draw a Poisson depth of mean `mu_rec` per row (LoopWM, equation 9).

        rows: indices in the global batch. places: see `DepthPlan`. sampling: `per_batch` gives all rows the depth of
        the first, `fixed` gives them round(mu_rec) loops.
        """
        # Drawn per row and not for the batch, so that the cut into micro-batches changes nothing.
        loops, noise_seeds = zip(*(_draw(seed, step, row, mu_rec, max_loops) for row in rows), strict=True)
        if sampling != "per_sequence":
            loops = (loops[0] if sampling == "per_batch" else min(max(1, round(mu_rec)), max_loops),) * len(rows)
        return cls(loops, backward_loops(mu_rec), noise_seeds, places)

    @property
    def longest(self) -> int:
        return max(self.loops)

    def rows_at(self, remaining: int, device: torch.device) -> Tensor:
        """Return the rows that still have `remaining` loops to run, int64 (n,).

        Passes are aligned at their last loop, so a shallow row joins late instead of leaving early.
        """
        return torch.tensor([i for i, loops in enumerate(self.loops) if loops >= remaining], device=device)

    def initial_state(self, length: int, dim: int, device: torch.device) -> Tensor:
        """Draw h^(0) ~ N(0, 2 / (5 D)), truncated at NOISE_CUT standard deviations: (B, length, dim) float32.

        LoopWM, section 3.2 leaves the variance open; Parcae, table 18 uses that of the initial weights. A row's values
        for its first positions do not depend on its padding.
        """
        rows = torch.empty(len(self.noise_seeds), length, dim, device=device)
        for row, seed in zip(rows, self.noise_seeds, strict=True):
            torch.rand(length, dim, generator=torch.Generator(device=device).manual_seed(seed), out=row)
        # Invert the truncated distribution function: library samplers draw a number of values that depends on
        # the length, so the same row would get other noise under other padding.
        tail = 0.5 * math.erfc(NOISE_CUT / math.sqrt(2))
        quantiles = tail + rows * (1 - 2 * tail)
        noise = math.sqrt(2 / (5 * dim)) * torch.special.ndtri(quantiles)
        return noise if self.places is None else noise.gather(1, self.places[:, :, None].expand(-1, -1, dim))


def ramped_mean(mu_rec: float, step: int, start: int, steps: int) -> float:
    """Return the mean depth of an optimiser step: 1 up to step `start`, then linear to `mu_rec` over `steps` steps."""
    if step < start:
        return 1.0
    ramped = step - start
    return mu_rec if ramped >= steps else 1.0 + (mu_rec - 1.0) * ramped / steps
