"""Calibration: imagined against true distribution of the drifting ball of Catch.

From the first frame of an episode the paddle stays, and the ball's column is counted over many imagined worlds. The
true chances follow from the rules. Counts are compared by Pearson's chi-square; frames whose row does not contain
exactly one ball are reported apart.

Shape suffixes: B worlds, H/W/C frame.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare

from loopwm.pixel.checkpoint import load_checkpoint
from loopwm.pixel.system import PixelSystem
from loopwm.records.config import typed
from loopwm.records.frames import FrameSpace

SPACE = FrameSpace("catch-drift", "1 drift=0.3", (10, 5, 1), 3)
ROWS, COLUMNS, DRIFT = 10, 5, 0.3
STAY = 1
AGES = (1, 4, 8)
"""Steps after which the ball's column is read; after nine the episode ends."""


def true_chances(start: int, steps: int) -> NDArray[np.float64]:
    """Return the chance of each column (COLUMNS,) after some steps from column `start`."""
    step = np.zeros((COLUMNS, COLUMNS))
    for column in range(COLUMNS):
        for move, chance in ((-1, DRIFT / 2), (0, 1 - DRIFT), (1, DRIFT / 2)):
            step[column, min(max(column + move, 0), COLUMNS - 1)] += chance
    return np.linalg.matrix_power(step, steps)[start]


def first_frame(column: int) -> NDArray[np.uint8]:
    """Create a frame (H, W, 1) with the ball in the first row and the paddle in the middle."""
    frame = np.zeros((ROWS, COLUMNS, 1), np.uint8)
    frame[0, column] = frame[ROWS - 1, COLUMNS // 2] = 255
    return frame


def ball_columns(frames: NDArray[np.uint8], row: int) -> NDArray[np.int64]:
    """Return the column of the ball in a row of each frame (B, H, W, C), -1 unless there is exactly one."""
    lit = frames[:, row, :, 0] > 0
    return np.where(lit.sum(1) == 1, lit.argmax(1), -1)


def imagined_columns(system: PixelSystem, sampling: Any, start: int, count: int, seed: int) -> dict[int, Any]:
    """Imagine `count` worlds of one start; return the ball's columns (B,) by age."""
    world, generator = system.world(sampling), torch.Generator().manual_seed(seed)
    obs = torch.from_numpy(first_frame(start)).expand(count, 1, -1, -1, -1)
    state = world.start(obs, torch.zeros(count, 0, dtype=torch.long), torch.ones(count, 1, dtype=torch.bool), generator)
    by_age = {}
    for age in range(1, max(AGES) + 1):
        state = world.step(state, torch.full((count,), STAY), generator).state
        if age in AGES:
            by_age[age] = ball_columns(world.show(state).numpy(), age)
    return by_age


def compare(columns: NDArray[np.int64], chances: NDArray[np.float64]) -> dict[str, Any]:
    """Return counts and the p-value under the true chances; 0 if an impossible column occurs."""
    counts = np.bincount(columns[columns >= 0], minlength=COLUMNS)
    possible, clear = chances > 0, int(counts.sum())
    wrong = int(counts[~possible].sum())
    p = chisquare(counts[possible], clear * chances[possible]).pvalue if clear and not wrong else 0.0
    result = {"counts": counts.tolist(), "expected": (clear * chances).round(1).tolist()}
    return result | {"unclear": int((columns < 0).sum()), "p": float(p)}


def measure(model: Path, count: int, seed: int) -> dict[str, Any]:
    """Compare imagined with true chances by sampling mode, start and age.

    Raises:
        InputError: the model is of another environment
    """
    system = load_checkpoint(model, "storm")
    SPACE.require(system.space, str(model))
    rows = []
    for latents in ("sample", "mode"):
        sampling: Any = typed(system.Sampling, {"latents": latents})
        for start in range(COLUMNS):
            by_age = imagined_columns(system, sampling, start, count, seed + start)
            for age, columns in by_age.items():
                result = compare(columns, true_chances(start, age))
                rows.append({"latents": latents, "start": start, "age": age, "worlds": count} | result)
    return {"model": str(model), "seed": seed, "rows": rows}
