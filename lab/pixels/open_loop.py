"""Quality of a world model: open-loop error by rollout step on held-out play.

Rollouts start from held-out play and imagine the recorded actions. A row counts up to its first end, real or imagined.

Shape suffixes: B rollouts, T ages, H/W/C frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopwm.pixel.imagined import FrameWorld
from loopwm.pixel.replay import Replay, as_learned
from serve.pixels.game import TOLERANCE, cell_size


@dataclass(frozen=True)
class OpenLoopRollouts:
    """Real and imagined columns, each (B, T): reward, end, whole, exact, and valid, False after a row's first end.

    lit: pixels above zero in each channel, (B, T, C). cells: share of a frame's cells that agree (`serve.pixels.game`),
    which counts where the step is valid in both (`comparable`): after a real end, frames are another episode's. There
    exact is False, and counts as wrong.

    Worlds imagine no truncation, so it does not count as an end, but steps after it are invalid.
    """

    real: dict[str, NDArray[Any]]
    imagined: dict[str, NDArray[Any]]

    def overall(self) -> dict[str, float]:
        """Return summary figures.

        Returns:
            `ends`: relative error of the share of ends; `objects`: share of whole imagined frames; mean rewards per
            step. Without a real end, one end in all steps is the real share.
        """
        real, imagined = means(self.real, "end"), means(self.imagined, "end")
        least = 1 / self.real["valid"].sum()  # else a world without ends would divide by 0
        return {
            "ends": float(abs(imagined - real) / max(real, least)),
            "objects": float(means(self.imagined, "whole")),
            "reward_real": float(means(self.real, "reward")),
            "reward_imagined": float(means(self.imagined, "reward")),
        }


FRAMES = ("whole", "exact", "cells", "lit")
"""Columns of frames."""


def means(part: dict[str, NDArray[Any]], name: str, axis: int | None = None) -> Any:
    """Return means of a column over valid rows; final frames, on which worlds are not trained, count in no figure."""
    counted, column = part["valid"] & ~part["end"] if name in FRAMES else part["valid"], part[name]
    if name == "cells":
        counted = counted & part["comparable"]
    counted = counted.reshape(*counted.shape, *[1] * (column.ndim - 2))  # lit has a value for each channel
    with np.errstate(invalid="ignore"):  # no valid row at an age: NaN
        return (column * counted).sum(axis) / counted.sum(axis)


def lit_pixels(frames: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Count pixels above zero in each channel: (..., H, W, C) -> (..., C)."""
    return np.count_nonzero(frames, axis=(-3, -2))


def agreeing_cells(frames: NDArray[np.uint8], real: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the share of cells in which frames (..., H, W, C) do not differ from real ones, (...)."""
    distance, size = np.abs(frames.astype(np.float32) - real).max(-1), cell_size(real[0, 0])
    rows, columns = (np.arange(0, side, size) for side in distance.shape[-2:])
    of_cells = [np.add.reduceat(np.add.reduceat(d, rows, -2), columns, -1) for d in (distance, np.ones_like(distance))]
    return (of_cells[0] / of_cells[1] < TOLERANCE).mean((-1, -2))


def whole(frames: NDArray[np.uint8], real: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return True for frames (B, T, H, W, C) with a pixel count per channel that real frames (N, H, W, C) have.

    Where real frames have one ball, frames with two balls or none are not whole.
    """
    reference, counts = lit_pixels(real), lit_pixels(frames)
    return ((reference.min(0) <= counts) & (counts <= reference.max(0))).all(-1)


def open_loop_rollouts(
    world: FrameWorld[Any],
    held_out: Replay,
    count: int,
    context: int,
    steps: int,
    rng: np.random.Generator,
    device: torch.device,
) -> OpenLoopRollouts:
    """Imagine `count` rollouts of `steps` actions after `context` frames of held-out play.

    Args:
        world: world to validate
        held_out: replay that the world was not trained on
        count: rollouts
        context: frames before a rollout
        steps: actions of a rollout
        rng: source of the places
        device: device of the world

    Raises:
        InputError: the held-out play is too short
    """
    segments = as_learned(held_out.sample(count, context + steps, rng))
    generator = torch.Generator(device).manual_seed(int(rng.integers(2**62)))
    obs, action, first = (torch.from_numpy(x).to(device) for x in (segments.obs, segments.action, segments.first))
    state = world.start(obs[:, :context], action[:, : context - 1], first[:, :context], generator)
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    for t in range(context - 1, context - 1 + steps):  # the last context frame takes the first action
        outcome = world.step(state, action[:, t], generator)
        state = outcome.state
        columns.append((outcome.reward, outcome.terminated, world.show(state)))
    reward, end, frames = (np.asarray(torch.stack(column, 1).cpu()) for column in zip(*columns, strict=True))
    ages = slice(context - 1, context - 1 + steps)
    # Worlds are not trained on final frames, so these do not set the range of pixel counts.
    inside = segments.obs.reshape(-1, *segments.obs.shape[2:])
    terminated, over = segments.terminated[:, ages], segments.terminated[:, ages] | segments.truncated[:, ages]
    true = np.ones_like(over)
    real = {"reward": segments.reward[:, ages], "end": terminated, "whole": true, "exact": true, "valid": _valid(over)}
    real["lit"] = lit_pixels(segments.next_obs[:, ages])
    # A frame after a real end is another episode's, so an imagined one that goes on beyond it is not exact.
    exact = (frames == segments.next_obs[:, ages]).all((2, 3, 4)) & real["valid"]
    imagined = {"reward": reward, "end": end, "whole": whole(frames, inside), "exact": exact, "valid": _valid(end)}
    imagined["lit"] = lit_pixels(frames)
    imagined["comparable"] = real["valid"]
    imagined["cells"] = agreeing_cells(frames, segments.next_obs[:, ages])
    return OpenLoopRollouts(real, imagined)


def _valid(over: NDArray[Any]) -> NDArray[np.bool_]:
    return (np.cumsum(over, 1) - over) == 0  # ends before this step
