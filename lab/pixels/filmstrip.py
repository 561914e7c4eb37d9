"""Filmstrips and films: real frames above imagined ones of the same start and actions, by sampling configuration."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from lab.reports.figures import save_figure
from loopwm.pixel.checkpoint import load_checkpoint
from loopwm.pixel.imagined import FrameWorld
from loopwm.pixel.system import PixelSystem
from loopwm.records.errors import InputError
from loopwm.records.files import write_atomic
from loopwm.records.frames import FrameEpisode, read_episode

Frames = NDArray[np.uint8]


def load(model: Path, episode: Path) -> tuple[PixelSystem, FrameEpisode]:
    """Load model and episode. Raises InputError for unreadable files or different frame spaces."""
    system, played = load_checkpoint(model), read_episode(episode)
    system.space.require(played.space, str(episode))
    return system, played


def world_of(system: PixelSystem, sampling: Mapping[str, Any]) -> FrameWorld[Any]:
    """Return the world. sampling: keys of that section. Raises InputError naming the key at fault."""
    return system.world(system.sampling_with(sampling))


@dataclass(frozen=True)
class Clip:
    """Range of an episode.

    Imagination starts at frame `start` after `context` frames, that one included, and takes `steps` of the recorded
    actions. `check` raises InputError for a range that the episode does not have.
    """

    start: int
    context: int
    steps: int

    @classmethod
    def within(cls, episode: FrameEpisode, start: int | None, context: int | None, steps: int | None) -> Clip:
        """Return a range of an episode: where None is given, one that an episode of any length has."""
        start = min(10, len(episode) // 2) if start is None else start
        context = min(5, start + 1) if context is None else context
        return cls(start, context, min(15, max(1, len(episode) - start)) if steps is None else steps)

    def check(self, episode: FrameEpisode) -> None:
        if self.start - self.context + 1 < 0:
            raise InputError(
                f"--context: must be at most {self.start + 1} frames up to frame {self.start}, got {self.context}"
            )
        if self.start + self.steps > len(episode):
            left = len(episode) - self.start
            raise InputError(f"--steps: must be <= {left}, the steps after frame {self.start}, got {self.steps}")


def imagined(world: FrameWorld[Any], episode: FrameEpisode, clip: Clip, seed: int) -> Frames:
    """Return the imagined frame after each step, (steps, H, W, C)."""
    start, context, steps = clip.start, clip.context, clip.steps
    generator = torch.Generator().manual_seed(seed)
    context_frames = slice(start - context + 1, start + 1)
    obs = torch.from_numpy(episode.obs[context_frames])[None]
    action = torch.from_numpy(episode.action[start - context + 1 : start])[None]
    first = torch.zeros(1, context, dtype=torch.bool)
    first[0, 0] = start - context + 1 == 0
    state, frames = world.start(obs, action, first, generator), []
    for step in range(steps):
        outcome = world.step(state, torch.from_numpy(episode.action[start + step : start + step + 1]), generator)
        state = outcome.state
        frames.append(world.show(state)[0].numpy())
    return np.stack(frames)


def draw(path: Path, rows: Mapping[str, Frames], every: int) -> None:
    """Draw a row of frames for each name, every `every` steps.

    Frames of other than three channels are shown by the index of the last channel that is set.
    """
    count = len(next(iter(rows.values()))[every - 1 :: every])
    canvas = Figure(figsize=(1.3 * count + 1.6, 1.4 * len(rows)), layout="constrained")
    axes = canvas.subplots(len(rows), count, squeeze=False)
    for column, place in enumerate(axes[0]):
        place.set_title(f"+{(column + 1) * every}", fontsize=9)
    for (name, frames), of_row in zip(rows.items(), axes, strict=True):
        for column, (frame, place) in enumerate(zip(frames[every - 1 :: every], of_row, strict=True)):
            place.imshow(_shown(frame), interpolation="nearest", vmin=0)
            place.set(xticks=[], yticks=[])
            if column == 0:
                place.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    save_figure(path, canvas)


def animate(path: Path, rows: Mapping[str, Frames], per_second: int) -> None:
    """Write the rows side by side, in their order, as a GIF that repeats; each pixel is enlarged."""
    scale = max(1, 160 // next(iter(rows.values())).shape[1])
    strips = []
    for frames in zip(*rows.values(), strict=True):
        gap = np.full((scale * len(frames[0]), 4, 3), 255, np.uint8)
        large = [np.kron(_coloured(frame), np.ones((scale, scale, 1), np.uint8)) for frame in frames]
        strips.append(Image.fromarray(np.concatenate([part for one in large for part in (one, gap)][:-1], 1)))
    buffer = io.BytesIO()
    strips[0].save(buffer, "GIF", save_all=True, append_images=strips[1:], duration=round(1000 / per_second), loop=0)
    write_atomic(path, buffer.getvalue())


def _coloured(frame: Frames) -> Frames:
    if frame.shape[2] == 3:
        return frame
    shown = colormaps["viridis"](_shown(frame) / frame.shape[2])
    return (255 * shown[..., :3]).astype(np.uint8)


def _shown(frame: Frames) -> NDArray[Any]:
    if frame.shape[2] == 3:
        return frame
    return ((frame > 0) * np.arange(1, frame.shape[2] + 1)).max(-1)
