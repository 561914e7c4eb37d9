"""MiniGrid, 64 x 64 pixels by default."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from data_prep.environments.pixels.base import Frame, Outcome, installed
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace

PIXELS = 64
TILES = 8
"""Visible tiles of each side, 7, and a border."""


class MiniGrid:
    """Agent's view of a grid: 7 x 7 tiles and a black border, as wide as one, on the right and below.

    With the border, tiles stay at multiples of their size. Action 6 does nothing in the Memory environments.

    Of tasks joined by + the seed of an episode decides which is played: one world model then learns them all.

    Infos: `metric`, 1 if the task is done, which alone is rewarded; of a Memory environment also `cue`, the place of
    the object to remember (row and column of its tile, -1 out of view), and `cue_kind`, 0 for a key and 1 for a ball.
    """

    def __init__(self, task: str, pixels: int = PIXELS) -> None:
        """Create an environment. task: such as MemoryS7, or MemoryS7+MemoryS9; pixels: of each side, a multiple of 8.

        Raises InputError for an unknown task.
        """
        from minigrid.wrappers import ImgObsWrapper, RGBImgPartialObsWrapper

        known = [name.removeprefix("MiniGrid-").removesuffix("-v0") for name in gymnasium.registry if "Grid-" in name]
        tasks = task.split("+")
        for unknown in sorted(set(tasks) - set(known)):
            raise InputError(f"minigrid: task: must be one of {', '.join(sorted(known))}, got {unknown!r}")
        envs = (gymnasium.make(f"MiniGrid-{name}-v0") for name in tasks)
        self._envs: list[Any] = [ImgObsWrapper(RGBImgPartialObsWrapper(env, tile_size=pixels // TILES)) for env in envs]
        self._env = self._envs[0]
        self._pixels, self._has_cue = pixels, all(name.startswith("Memory") for name in tasks)
        name = f"minigrid/{task}" if pixels == PIXELS else f"minigrid/{task}@pixels={pixels}"
        version = installed("minigrid", *(() if pixels == PIXELS else (f"pixels={pixels}",)))
        self.space = FrameSpace(name, version, (pixels, pixels, 3), int(self._env.action_space.n))

    def begin(self, seed: int) -> tuple[Frame, dict[str, Any]]:
        self._env = self._envs[seed % len(self._envs)]
        return self._padded(self._env.reset(seed=seed)[0]), self._info(done=False)

    def act(self, action: int) -> Outcome:
        view, reward, terminated, truncated, _ = self._env.step(action)
        return Outcome(self._padded(view), float(reward), terminated, truncated, self._info(done=reward > 0))

    def _padded(self, view: Frame) -> Frame:
        frame = np.zeros((self._pixels, self._pixels, 3), np.uint8)
        frame[: view.shape[0], : view.shape[1]] = view
        return frame

    def _info(self, done: bool) -> dict[str, Any]:
        metric = {"metric": np.float64(done)}
        if not self._has_cue:
            return metric
        grid: Any = self._env.unwrapped
        place = 1, grid.height // 2 - 1
        in_view = grid.in_view(*place) and grid.agent_sees(*place)
        column, row = grid.relative_coords(*place) if in_view else (-1, -1)
        cue = {"cue": np.array((row, column)), "cue_kind": int(grid.grid.get(*place).type == "ball")}
        return metric | cue

    def close(self) -> None:
        for env in self._envs:
            env.close()
