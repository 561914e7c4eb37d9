"""Decoding by transport as the paper prints it: whole matrices, loops, float64. Shares no code with the package.

The sign in the kernel of Algorithm 2 and the side that chooses in Algorithm 3 are put right.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def affinities(p: Matrix, u: list[int], grid: tuple[int, int], c_d: float, c_w: float) -> tuple[Matrix, Matrix]:
    """Equations 1 and 2 of one frame: p (L, K), tokens u (L). Both matrices (L, L)."""
    size = len(u)
    prev, gen = np.full((size, size), -np.inf), np.full((size, size), -np.inf)
    for i in range(size):
        for j in range(size):
            (y, x), (y2, x2) = divmod(i, grid[1]), divmod(j, grid[1])
            d = (x - x2) ** 2 + (y - y2) ** 2
            if d <= 4:
                prev[i, j] = p[j][u[i]] - c_d * d
        gen[i, i] = max(p[i]) - c_w
    return prev, gen


def sinkhorn(prev: Matrix, gen: Matrix, epsilon: float, iterations: int) -> tuple[Matrix, Matrix]:
    """Algorithm 1's plan on the square problem, by Algorithm 2, with marginals of 1."""
    size = len(prev)
    affinity = np.vstack([np.hstack([prev, np.zeros((size, size))]), np.hstack([gen, np.zeros((size, size))])])
    kernel = np.exp(affinity / epsilon)
    u, v = np.ones(2 * size), np.ones(2 * size)
    for _ in range(iterations):
        u = 1 / (kernel @ v)
        v = 1 / (kernel.T @ u)
    plan = u[:, None] * kernel * v
    return plan[:size, :size], plan[size:, :size]


def binarize(prev: Matrix, gen: Matrix) -> list[int]:
    """Section 3.2: the source of each column, or -1. Columns choose rows, losers again among free rows."""
    size = len(prev)
    rows = [[*prev[:, j], *gen[:, j]] for j in range(size)]
    chosen: dict[int, int] = {}
    while len(chosen) < size:
        wishes: dict[int, list[int]] = {}
        for j in range(size):
            if j not in chosen:
                free = [i for i in range(2 * size) if i not in chosen.values() and rows[j][i] > -math.inf]
                wishes.setdefault(max(free, key=lambda i, j=j: (rows[j][i], -i)), []).append(j)
        for i, columns in wishes.items():
            chosen[max(columns, key=lambda j, i=i: (rows[j][i], -j))] = i
    return [chosen[j] if chosen[j] < size else -1 for j in range(size)]


def objective(prev: Matrix, gen: Matrix, sources: list[int]) -> float:
    """What equation 3 maximises, of a whole plan."""
    return float(sum(gen[j, j] if i < 0 else prev[i, j] for j, i in enumerate(sources)))


def best_objective(prev: Matrix, gen: Matrix) -> float:
    """The largest objective of all plans, by trying every one: for grids of a few places."""

    def best(j: int, used: frozenset[int]) -> float:
        if j == len(prev):
            return 0.0
        copies = [
            prev[i, j] + best(j + 1, used | {i}) for i in range(len(prev)) if i not in used and prev[i, j] > -math.inf
        ]
        return max([gen[j, j] + best(j + 1, used), *copies])

    return best(0, frozenset())


def sample(p: Matrix, u: float) -> int:
    """The token whose share of the cumulated probabilities holds u in [0, 1)."""
    total = 0.0
    for token, share in enumerate(p):
        total += share
        if u < total:
            return token
    return int(np.flatnonzero(p)[-1])
