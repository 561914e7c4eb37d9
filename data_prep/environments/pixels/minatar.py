"""MinAtar: 10 x 10 frames, one channel a kind of object, 0 or 255.

Actions are each game's minimal set. As in the package, an action is replaced by the last one with probability 0.1 and
the games get harder; both are in the version of the space. Without sticky actions an episode has at most 1,000 steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from data_prep.environments.pixels.base import Frame, Outcome, Simulator, installed
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace

GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
LIMIT = 1000
"""Steps after which an episode without sticky actions is truncated, as in gymnax."""


class MinAtar(Simulator):
    def __init__(self, game: str, sticky: float = 0.1) -> None:
        """Create a game. sticky: probability of repeating the last action. Raises InputError for an unknown game."""
        from minatar import Environment

        if game not in GAMES:
            raise InputError(f"minatar: game: must be one of {', '.join(GAMES)}, got {game!r}")
        self._env = Environment(game, sticky_action_prob=sticky, difficulty_ramping=True)
        self._actions: list[int] = self._env.minimal_action_set()
        self._limit, self._steps = (0 if sticky else LIMIT), 0
        limit = (f"limit={LIMIT}",) if self._limit else ()
        version = installed("minatar", f"sticky={sticky:g}", "ramping", *limit)
        name = f"minatar/{game}" if sticky else f"minatar/{game}@sticky=0"
        self.space = FrameSpace(name, version, tuple(self._env.state_shape()), len(self._actions))

    def begin(self, seed: int) -> tuple[Frame, dict[str, Any]]:
        self._env.seed(seed)
        self._env.last_action = 0  # reset: the package may repeat the last action of the previous episode
        self._env.reset()
        self._steps = 0
        return self._frame(), {}

    def act(self, action: int) -> Outcome:
        reward, over = self._env.act(self._actions[action])
        self._steps += 1
        truncated = not over and self._steps == self._limit
        return Outcome(self._frame(), float(reward), bool(over), truncated)

    def _frame(self) -> Frame:
        return np.where(self._env.state(), np.uint8(255), np.uint8(0))
