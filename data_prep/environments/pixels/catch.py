"""Catch: a ball falls over a board of 10 x 5, and the paddle on the last row must catch it (bsuite's rules).

The smallest game with a delayed reward: an episode is nine actions long, and only the last frame pays, 1 or -1. The
drifting ball moves left or right by one with probability 0.3 in each step but stays on the board: a test of whether an
imagined world is as uncertain as the true one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from data_prep.environments.pixels.base import Frame, Outcome, Simulator
from loopwm.records.frames import FrameSpace

ROWS, COLUMNS = 10, 5
RULES = "1"
"""Version of the rules, since no package has one."""


class Catch(Simulator):
    """Catch with actions 0, 1, 2: left, stay, right. The paddle begins in the middle."""

    def __init__(self, name: str = "catch", drift: float = 0.0) -> None:
        """Create the game. drift: probability of a sideways move of the ball in a step."""
        self.space = FrameSpace(name, f"{RULES} drift={drift:g}", (ROWS, COLUMNS, 1), 3)
        self._drift = drift

    def begin(self, seed: int) -> tuple[Frame, dict[str, Any]]:
        self._rng = np.random.default_rng(seed)
        self._ball, self._row, self._paddle = int(self._rng.integers(COLUMNS)), 0, COLUMNS // 2
        return self._frame(), {}

    def act(self, action: int) -> Outcome:
        self._paddle = min(max(self._paddle + action - 1, 0), COLUMNS - 1)
        self._row += 1
        if self._drift and self._rng.random() < self._drift:
            self._ball = min(max(self._ball + int(self._rng.choice((-1, 1))), 0), COLUMNS - 1)
        over = self._row == ROWS - 1
        reward = (1.0 if self._ball == self._paddle else -1.0) if over else 0.0
        return Outcome(self._frame(), reward, over, False)

    def _frame(self) -> Frame:
        frame = np.zeros((ROWS, COLUMNS, 1), np.uint8)
        frame[self._row, self._ball] = frame[ROWS - 1, self._paddle] = 255
        return frame
