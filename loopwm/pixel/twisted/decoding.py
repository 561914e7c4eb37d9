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

CHECK_EVERY = 10

REACH = 4
"""Maximum squared distance, in grid places, over which a token can be copied."""


class Decoder(Protocol):
    def __call__(self, p: Tensor, previous: Tensor, generator: torch.Generator) -> Tensor:
        """Choose tokens int64 (B, L) from probabilities (B, L, K) and the previous tokens int64 (B, L)."""


class Solver(Protocol):
    def __call__(self, copy: Tensor, wildcard: Tensor) -> Tensor:
        """Assign a source to each destination, none used twice, or WILDCARD: int64 (B, R).

        copy: affinity of source i to destination j, (B, R, R), -inf out of reach
        wildcard: affinity of sampling j, (B, R), finite
        """


@dataclass(frozen=True)
class Sample:
    """Sample every token from its probabilities, independently."""

    def __call__(self, p: Tensor, previous: Tensor, generator: torch.Generator) -> Tensor:
        return sample(p, generator)


@dataclass(frozen=True)
class ExactAssignment:
    """Optimal assignment (TWISTED, equation 3) by scipy, row by row on the CPU; copies win ties with samples.

    The equation is linear and its feasible corners are integers: an assignment problem.

    Raises:
        ImportError: scipy is missing
    """

    def __post_init__(self) -> None:
        _scipy_assignment()

    def __call__(self, copy: Tensor, wildcard: Tensor) -> Tensor:
        assign = _scipy_assignment()
        own = torch.full_like(copy, math.inf).diagonal_scatter(-wildcard, dim1=-2, dim2=-1)
        cost = torch.cat([-copy.mT, own], -1).double().cpu().numpy()  # copies first: scipy returns the first of ties
        columns = torch.tensor([assign(problem)[1].tolist() for problem in cost], device=copy.device)
        return columns.where(columns < copy.shape[-1], WILDCARD)


@dataclass(frozen=True)
class Sinkhorn:
    """Batched approximate assignment (TWISTED, equation 3) by Sinkhorn iterations (TWISTED, algorithms 1 and 2).

    Entropic transport between 2R sources and R destinations with R dummy destinations of cost 0 for unused sources,
    then `binarize`. The kernel is exp(-cost / epsilon): Algorithm 2 lacks the sign. It works on logarithms, since exp(1
    / epsilon) overflows, and in float32, whose last digit is worth 0.008 of a logarithm at the paper's epsilon of 1e-5.

    The paper's 10 iterations at 1e-5 are far from the fixed point: on random peaked frames of 9 x 9 they differ from
    `ExactAssignment` for about a third of the tokens, and copy some from other places at prices at which that never
    pays. 100 iterations at 0.03 agree with it there; where much moves, on 97 % of
    the tokens. At c_d = 0 equal tokens are equally good sources, and the plan is divided among them. The published code
    uses `Sinkhorn(1e-5, 2000, 1e-3, relative=True)`.
    """

    epsilon: float = 1e-5
    iterations: int = 10
    threshold: float = 0.0
    """Stop once every source's mass is within this of its share (checked every `CHECK_EVERY` iterations); 0: never."""
    relative: bool = False
    """Scale epsilon by the standard deviation of the finite affinities, wildcards included."""

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon: must be above 0, got {self.epsilon}")
        if self.iterations < 1:
            raise ValueError(f"iterations: must be at least 1, got {self.iterations}")

    def __call__(self, copy: Tensor, wildcard: Tensor) -> Tensor:
        return binarize(*self.log_plan(copy, wildcard))

    def log_plan(self, copy: Tensor, wildcard: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log plan, whose columns sum to 1: copies (B, R, R) and wildcards (B, R).

        All dummy columns are equal, and so are the entries of a wildcard's row except its own: one of each is computed.
        """
        epsilon: Tensor | float = self.epsilon
        if self.relative:
            epsilon = self.epsilon * _deviation(copy.float(), wildcard.float()).clamp(min=1e-6)
            copy, wildcard = copy.float() / epsilon[:, :, None], wildcard.float() / epsilon
        else:
            copy, wildcard = copy.float() / epsilon, wildcard.float() / epsilon
        log_dummies = math.log(copy.shape[-1])  # equal dummies count as one
        column, dummy = torch.zeros_like(wildcard), torch.zeros_like(wildcard[:, :1])
        for iteration in range(self.iterations):
            row = -torch.logaddexp((copy + column[:, None]).logsumexp(2), dummy + log_dummies)
            own_row = -torch.logaddexp(wildcard + column, dummy + log_dummies)
            column = -torch.logaddexp((copy + row[:, :, None]).logsumexp(1), wildcard + own_row)
            dummy = -torch.cat([row, own_row], 1).logsumexp(1, keepdim=True)
            if self.threshold and iteration % CHECK_EVERY == CHECK_EVERY - 1:
                mass = torch.logaddexp((copy + column[:, None]).logsumexp(2), dummy + log_dummies) + row
                if (mass.exp() - 1).abs().max() <= self.threshold:
                    break
        return copy + row[:, :, None] + column[:, None], wildcard + own_row + column


def _deviation(copy: Tensor, wildcard: Tensor) -> Tensor:
    """Return the standard deviation of the finite affinities, wildcards included: (B, 1)."""
    values = torch.cat((copy.flatten(1), wildcard), 1)
    there = values.isfinite()
    values, count = values.where(there, 0), there.sum(1, keepdim=True)
    mean = values.sum(1, keepdim=True) / count
    return (((values - mean).square() * there).sum(1, keepdim=True) / count).sqrt()


def binarize(copy: Tensor, wildcard: Tensor) -> Tensor:
    """Round a plan (values or logarithms) to a source for each destination, none used twice, or WILDCARD.

    Every column chooses its best source; of several that choose the same, the one with the largest value (the first of
    ties) gets it and the others choose again among the free ones. TWISTED, algorithm 3 prints the opposite, rows that
    choose columns: 2R rows claim R columns of which none may be claimed twice, so it cannot terminate. This is the text
    of TWISTED, section 3.2; every round settles a column, hence at most R rounds.

    copy: (B, R, R), -inf where a source is out of reach; wildcard: (B, R), finite. Returns int64 (B, R).
    """
    places = torch.arange(wildcard.shape[1], device=wildcard.device)
    sources = torch.full_like(wildcard, WILDCARD, dtype=torch.int64)
    waiting = torch.ones_like(wildcard, dtype=torch.bool)
    for _ in range(len(places)):
        best, source = copy.max(1)
        waiting = waiting & (best >= wildcard)  # sources only get fewer, so it waits no more
        if not waiting.any():
            break
        bids = best.masked_fill(~waiting, -math.inf)
        highest = torch.full_like(bids, -math.inf).scatter_reduce(1, source, bids, "amax")
        leads = waiting & (bids == highest.gather(1, source))
        winner = torch.full_like(source, len(places)).scatter_reduce(
            1, source, places.where(leads, len(places)), "amin"
        )
        wins = leads & (winner.gather(1, source) == places)  # the first of equal bids
        sources, waiting = torch.where(wins, source, sources), waiting & ~wins
        copy = copy.masked_fill((winner < len(places))[:, :, None], -math.inf)  # assigned sources
    return sources


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

        Raises:
            ValueError: p or previous does not fit the grid
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


def centre_region(grid: tuple[int, int], edge: int = 1, bottom_rows: int = 0) -> Tensor:
    """Return the region of transport in Craftax and crafter: without inventory rows and map edges, bool (L,).

    TWISTED, appendix D describes it in words. Crafter's 9 x 9 places are 7 rows of map above 2 of inventory:
    centre_region((9, 9), 1, 2) has 5 x 7 places.

    Raises:
        ValueError: nothing is left
    """
    rows, columns = grid[0] - bottom_rows, grid[1]
    if min(edge, bottom_rows) < 0 or 2 * edge >= min(rows, columns):
        raise ValueError(f"region: must leave part of the grid {grid}, got edge {edge} and bottom_rows {bottom_rows}")
    region = torch.zeros(grid, dtype=torch.bool)
    region[edge : rows - edge, edge : columns - edge] = True
    return region.flatten()


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


def _scipy_assignment() -> Callable[..., Any]:
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise ImportError("exact assignment needs scipy: pip install 'loopwm[pixel]'") from None
    solve: Callable[..., Any] = linear_sum_assignment
    return solve


@dataclass(frozen=True)
class DecoderConfig:
    """Decoder by name, with its prices."""

    kind: Literal["sample", "noised-transport"]
    c_d: float = 0.0
    c_w: float = 0.0
    solver: Literal["exact", "sinkhorn"] = "exact"
    epsilon: float = 1e-5
    iterations: int = 10
    threshold: float = 0.0
    relative: bool = False
    """Options of `Sinkhorn`."""

    def decoder(self, grid: tuple[int, int], region: Tensor) -> Decoder:
        """Create the decoder. region: bool (L,), True where transport applies."""
        if self.kind == "sample":
            return Sample()
        return NoisedTransport(grid, self.c_d, self.c_w, self.assignment(), region)

    def assignment(self) -> Solver:
        """Create the solver."""
        if self.solver == "exact":
            return ExactAssignment()
        return Sinkhorn(self.epsilon, self.iterations, self.threshold, self.relative)


@dataclass(frozen=True)
class Centre:
    """Region of transport and of centre-exact frames: the grid without its edge and the rows below the map."""

    edge: int = 0
    bottom_rows: int = 0

    def region(self, grid: tuple[int, int]) -> Tensor:
        return centre_region(grid, self.edge, self.bottom_rows)
