"""Is a world as uncertain as the true one? Where the drifting ball of Catch is imagined to be, beside where it can be.

From the first frame of an episode the paddle stays, and the ball's column is counted over many imagined worlds. The
true chances follow from the rules. Outcomes are compared by Pearson's chi-square; frames in which a row does not hold
exactly one ball are result apart.

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
"""Steps after which the ball is looked for; after nine the episode is over."""


def true_chances(start: int, steps: int) -> NDArray[np.float64]:
    """The chance of each column (COLUMNS,) to have the ball after some steps from column `start`."""
    step = np.zeros((COLUMNS, COLUMNS))
    for column in range(COLUMNS):
        for move, chance in ((-1, DRIFT / 2), (0, 1 - DRIFT), (1, DRIFT / 2)):
            step[column, min(max(column + move, 0), COLUMNS - 1)] += chance
    return np.linalg.matrix_power(step, steps)[start]


def first_frame(column: int) -> NDArray[np.uint8]:
    """(H, W, 1): the ball in the first row, the paddle in the middle."""
    frame = np.zeros((ROWS, COLUMNS, 1), np.uint8)
    frame[0, column] = frame[ROWS - 1, COLUMNS // 2] = 255
    return frame


def ball_columns(frames: NDArray[np.uint8], row: int) -> NDArray[np.int64]:
    """The column of the one ball in a row of each frame (B, H, W, C), -1 where there is not exactly one."""
    lit = frames[:, row, :, 0] > 0
    return np.where(lit.sum(1) == 1, lit.argmax(1), -1)


def imagined_columns(system: PixelSystem, sampling: Any, start: int, count: int, seed: int) -> dict[int, Any]:
    """Columns (B,) of the ball by age, in `count` worlds of one start."""
    world, generator = system.world(sampling), torch.Generator().manual_seed(seed)
    obs = torch.from_numpy(first_frame(start)).expand(count, 1, -1, -1, -1)
    state = world.start(obs, torch.zeros(count, 0, dtype=torch.long), torch.ones(count, 1, dtype=torch.bool), generator)
    found = {}
    for age in range(1, max(AGES) + 1):
        state = world.step(state, torch.full((count,), STAY), generator).state
        if age in AGES:
            found[age] = ball_columns(world.show(state).numpy(), age)
    return found


def compare(columns: NDArray[np.int64], chances: NDArray[np.float64]) -> dict[str, Any]:
    """Counts, and the chance that they or worse come of the true chances; a column that cannot be: none."""
    counts = np.bincount(columns[columns >= 0], minlength=COLUMNS)
    possible, clear = chances > 0, int(counts.sum())
    wrong = int(counts[~possible].sum())
    p = chisquare(counts[possible], clear * chances[possible]).pvalue if clear and not wrong else 0.0
    result = {"counts": counts.tolist(), "expected": (clear * chances).round(1).tolist()}
    return result | {"unclear": int((columns < 0).sum()), "p": float(p)}


def measure(model: Path, count: int, seed: int) -> dict[str, Any]:
    """Compares by way of drawing latents, start and age. Raises InputError for a model of another environment."""
    system = load_checkpoint(model, "storm")
    SPACE.require(system.space, str(model))
    rows = []
    for latents in ("sample", "mode"):
        sampling: Any = typed(system.Sampling, {"latents": latents})
        for start in range(COLUMNS):
            found = imagined_columns(system, sampling, start, count, seed + start)
            for age, columns in found.items():
                result = compare(columns, true_chances(start, age))
                rows.append({"latents": latents, "start": start, "age": age, "worlds": count} | result)
    return {"model": str(model), "seed": seed, "rows": rows}
