"""Decoders of the next frame from its tokens' probabilities and the previous frame (TWISTED, section 3.2).

Decoders map next-token probabilities p (B, L, K), whose rows sum to 1, and the previous frame's tokens u (B, L) to
tokens (B, L). Decoders that sample use the same random numbers at the same generator state, column by column: two
decoders differ only where their rules do.

Shapes: B batch, L tokens of a frame, K codes; R tokens of the region that transport decides. Index i is a place of the
previous frame (source), j a place of the next one (destination).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

WILDCARD = -1
"""Source of a destination that copies nothing."""

REACH = 4
"""Maximum squared distance, in grid places, over which a token can be copied."""


class Decoder(Protocol):
    def __call__(self, p: Tensor, previous: Tensor, generator: torch.Generator) -> Tensor:
        """Choose tokens int64 (B, L) from probabilities (B, L, K) and the previous tokens int64 (B, L)."""


Solver = Callable[[Tensor, Tensor], Tensor]
"""Assigns a source to each destination, none used twice, or WILDCARD: int64 (B, R).

Takes the affinity of source i to destination j, (B, R, R), -inf out of reach, and that of sampling j, (B, R), finite.
"""


@dataclass(frozen=True)
class Sample:
    """Sample every token from its probabilities, independently."""

    def __call__(self, p: Tensor, previous: Tensor, generator: torch.Generator) -> Tensor:
        return sample(p, generator)


class ExactAssignment:
    """Optimal assignment (TWISTED, equation 3) by scipy, row by row on the CPU; copies win ties with samples.

    The equation is linear and its feasible corners are integers: an assignment problem, which takes 0.3 ms for 81
    places. The published code approximates it by up to 2,000 Sinkhorn iterations (`lab/pixels/sinkhorn.py`). Raises
    ImportError without scipy.
    """

    def __init__(self) -> None:
        try:
            from scipy.optimize import linear_sum_assignment
        except ImportError:
            raise ImportError("exact assignment needs scipy: pip install 'loopwm[pixel]'") from None
        self._assign: Callable[..., Any] = linear_sum_assignment

    def __call__(self, copy: Tensor, wildcard: Tensor) -> Tensor:
        own = torch.full_like(copy, math.inf).diagonal_scatter(-wildcard, dim1=-2, dim2=-1)
        cost = torch.cat([-copy.mT, own], -1).double().cpu().numpy()  # copies first: scipy returns the first of ties
        columns = torch.tensor([self._assign(problem)[1].tolist() for problem in cost], device=copy.device)
        return columns.where(columns < copy.shape[-1], WILDCARD)


@dataclass(frozen=True, eq=False)
class NoisedTransport:
    """Optimal transport of the previous frame's tokens (TWISTED, equations 1 to 4), as in the published code.

    Gumbel noise is added to the logits, and both affinities use the noised probabilities. The most likely token after
    noise is a sample, and wildcards take it. So a token that stays with probability 0.48 stays about as often, where
    the paper's transport without noise always keeps it.

    grid: rows and columns of the frame
    c_d: price of a squared distance of 1
    c_w: price of sampling
    region: bool (L,), True where transport applies, None for everywhere
    """

    grid: tuple[int, int]
    c_d: float
    c_w: float
    solver: Solver
    region: Tensor | None = None

    def __post_init__(self) -> None:
        check_penalty("c_d", self.c_d)
        check_penalty("c_w", self.c_w)
        region, count = self.region, math.prod(self.grid)
        if region is not None and (region.dtype != torch.bool or region.shape != (count,) or not region.any()):
            raise ValueError(f"region: must be {count} bools, one per token, at least one True")

    def __call__(self, p: Tensor, previous: Tensor, generator: torch.Generator) -> Tensor:
        noised = with_gumbel_noise(p, generator)
        sources = self.sources(noised, previous)
        return torch.where(sources == WILDCARD, noised.argmax(-1), previous.gather(1, sources.clamp(min=0)))

    def sources(self, p: Tensor, previous: Tensor) -> Tensor:
        """Return the previous frame's place that each token is copied from, or WILDCARD: int64 (B, L).

        Raises ValueError if p or previous does not fit the grid.
        """
        count = math.prod(self.grid)
        if p.shape[1:2] != (count,) or previous.shape != p.shape[:2]:
            raise ValueError(
                f"p, previous: must be probabilities and tokens of {count} places, got {tuple(p.shape)} "
                f"and {tuple(previous.shape)}"
            )
        price = copy_price(self.grid, self.c_d).to(p.device)
        if self.region is None:
            return self.solver(*affinities(p, previous, price, self.c_w))
        inside = self.region.nonzero()[:, 0].to(p.device)
        chosen = self.solver(*affinities(p[:, inside], previous[:, inside], price[inside][:, inside], self.c_w))
        copied = torch.where(chosen == WILDCARD, WILDCARD, inside[chosen])
        return torch.full_like(previous, WILDCARD).index_copy(1, inside, copied)


def with_gumbel_noise(p: Tensor, generator: torch.Generator) -> Tensor:
    """Return softmax(log p + noise) of probabilities (..., K); where p is 0 it stays 0."""
    u = torch.rand(p.shape, generator=generator, device=generator.device).to(p.device)
    noise = -(-u.clamp(1e-20, 1 - 1e-7).log()).log()  # finite at both ends
    return (p.float().log() + noise).softmax(-1)


def affinities(p: Tensor, previous: Tensor, price: Tensor, c_w: float) -> tuple[Tensor, Tensor]:
    """Compute TWISTED, equations 1 and 2.

    Args:
        p: probabilities (B, R, K)
        previous: tokens (B, R)
        price: prices (R, R) of a copy from i to j
        c_w: price of sampling

    Returns:
        The affinities of copies (B, R, R), A[b, i, j] = p[b, j, u_i] - price[i, j], and of wildcards (B, R), float32.
    """
    p = p.float()
    sources = previous[:, None].expand(-1, previous.shape[1], -1)
    return p.gather(-1, sources).mT - price, p.amax(-1) - c_w  # (destination, source) to A[i, j]


def copy_price(grid: tuple[int, int], c_d: float) -> Tensor:
    """Return c_d times the squared distance of two grid places, +inf beyond REACH: (L, L) (TWISTED, appendix D)."""
    places = torch.cartesian_prod(*(torch.arange(float(side)) for side in grid))
    distance = (places[:, None] - places).square().sum(-1)
    return (c_d * distance).masked_fill(distance > REACH, math.inf)


def sample(p: Tensor, generator: torch.Generator) -> Tensor:
    """Sample a token for each row of probabilities (B, L, K) by one uniform number each: int64 (B, L).

    The generator may be on another device than p: a run then uses the same numbers on every device.
    """
    return invert(p, torch.rand(p.shape[:-1], generator=generator, device=generator.device).to(p.device))


def invert(p: Tensor, u: Tensor) -> Tensor:
    """Return the tokens whose interval of the cumulated probabilities (..., K) contains u (...) in [0, 1]: int64 (...).

    Never returns a token of probability 0.
    """
    cumulated = p.float().cumsum(-1)
    whole = cumulated[..., -1:]
    # u near 1 may round to the whole sum, where no token is left.
    place = torch.minimum(u[..., None] * whole, whole.nextafter(torch.zeros_like(whole)))
    tokens = torch.searchsorted(cumulated, place, right=True)
    possible = p.gather(-1, tokens) > 0  # rounding in a parallel sum may rise where p is 0
    return tokens.where(possible, p.argmax(-1, keepdim=True))[..., 0]


def check_penalty(name: str, value: float) -> None:
    """Raise ValueError for a price that is not finite and at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}: must be a finite price >= 0, got {value}")


@dataclass(frozen=True)
class DecoderConfig:
    """Decoder by name, with its prices."""

    kind: Literal["sample", "noised-transport"]
    c_d: float = 0.0
    c_w: float = 0.0

    def decoder(self, grid: tuple[int, int], region: Tensor) -> Decoder:
        """Create the decoder. region: bool (L,), True where transport applies."""
        if self.kind == "sample":
            return Sample()
        return NoisedTransport(grid, self.c_d, self.c_w, ExactAssignment(), region)


@dataclass(frozen=True)
class Centre:
    """Region of transport and of centre-exact frames: the grid without its edge and the rows below the map.

    TWISTED, appendix D describes it in words for Craftax and crafter. Crafter's 9 x 9 places are 7 rows of map above 2
    of inventory: Centre(edge=1, bottom_rows=2) leaves 5 x 7 places.
    """

    edge: int = 0
    bottom_rows: int = 0

    def region(self, grid: tuple[int, int]) -> Tensor:
        """Return the region, bool (L,). Raises ValueError if nothing is left."""
        edge, rows, columns = self.edge, grid[0] - self.bottom_rows, grid[1]
        if min(edge, self.bottom_rows) < 0 or 2 * edge >= min(rows, columns):
            raise ValueError(f"region: must leave part of {grid}, got edge {edge}, bottom_rows {self.bottom_rows}")
        region = torch.zeros(grid, dtype=torch.bool)
        region[edge : rows - edge, edge : columns - edge] = True
        return region.flatten()
