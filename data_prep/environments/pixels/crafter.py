"""Crafter, 63 x 63 pixels by default: 9 x 9 tiles of 7 x 7, the map in the upper 7 rows, the inventory below.

At night the simulator draws noise over the map from the same random numbers that move its creatures: night frames
cannot be predicted pixel by pixel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from data_prep.environments.pixels.base import Frame, Outcome, Simulator, installed
from loopwm.records.frames import FrameSpace

PIXELS = 63
"""Pixels of each side; at 64, Crafter's own size, a row and a column stay black behind tiles of 7."""

MAP_TILES = np.array((9, 7))
"""Columns and rows of the visible map; the player stands in the middle."""


class Crafter(Simulator):
    """One world.

    Infos: `creature`, True with a cow, zombie or skeleton in sight; `achievements`, counts of each of the 22 in the
    episode so far (uint16, in the simulator's order).
    """

    def __init__(self, pixels: int = PIXELS) -> None:
        from crafter import constants, objects

        self._creatures = (objects.Cow, objects.Zombie, objects.Skeleton)
        self._env = _make(pixels)
        name = "crafter" if pixels == PIXELS else f"crafter@pixels={pixels}"
        self.space = FrameSpace(name, installed("crafter"), (pixels, pixels, 3), len(constants.actions))

    def begin(self, seed: int) -> tuple[Frame, dict[str, Any]]:
        self._env._seed, self._env._episode = seed, 0
        frame = self._env.reset()
        return frame, self._info()

    def act(self, action: int) -> Outcome:
        frame, reward, over, info = self._env.step(action)
        dead = info["discount"] == 0
        return Outcome(frame, float(reward), dead, over and not dead, self._info())

    def _info(self) -> dict[str, Any]:
        player = self._env._player
        corner = player.pos - MAP_TILES // 2
        creatures = [thing.pos - corner for thing in self._env._world.objects if isinstance(thing, self._creatures)]
        in_view = any(((place >= 0) & (place < MAP_TILES)).all() for place in creatures)
        return {"creature": in_view, "achievements": np.array(list(player.achievements.values()), np.uint16)}


def _make(pixels: int) -> Any:
    """Create the simulator, made repeatable: it picks creatures to remove from sets, which are ordered by address."""
    import crafter

    class Repeatable(crafter.Env):
        def _balance_chunk(self, chunk: Any, objs: Any) -> None:
            numbers = self._world._obj_map
            super()._balance_chunk(chunk, sorted(objs, key=lambda thing: numbers[tuple(thing.pos)]))

    return Repeatable(size=(pixels, pixels))
