"""Interface of frame simulators, and their Gymnasium environment. Needs gymnasium (extra: pixel)."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace

Frame = NDArray[np.uint8]

SEEDS = 2**31
"""Bound of seeds that all simulators accept."""


@dataclass(frozen=True)
class Outcome:
    """Result of an action. info: the simulator's other values, with the same names at every frame."""

    frame: Frame
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any] = field(default_factory=dict)


class Simulator(Protocol):
    """One game, decided by the seed of `begin` and the actions."""

    space: FrameSpace

    def begin(self, seed: int) -> tuple[Frame, dict[str, Any]]:
        """Start an episode; return its first frame and infos."""

    def act(self, action: int) -> Outcome: ...

    def close(self) -> None:
        """Release the simulator; nothing to do by default."""


class FrameEnvironment(gymnasium.Env[Frame, np.int64]):
    """Environment of uint8 frames (H, W, C) and discrete actions, with the simulator's `info`.

    `reset(seed=...)` decides everything up to the next reset with a seed.
    """

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self.space = simulator.space
        self.observation_space = spaces.Box(0, 255, self.space.frame_shape, np.uint8)
        self.action_space = spaces.Discrete(self.space.actions)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Frame, dict[str, Any]]:
        super().reset(seed=seed)
        return self._simulator.begin(int(self.np_random.integers(SEEDS)))

    def step(self, action: np.int64) -> tuple[Frame, float, bool, bool, dict[str, Any]]:
        """Take a step. Raises InputError for an action outside the space."""
        if not self.action_space.contains(action):
            raise InputError(f"action: must be below {self.space.actions} for {self.space.env}, got {int(action)}")
        outcome = self._simulator.act(int(action))
        return outcome.frame, outcome.reward, outcome.terminated, outcome.truncated, outcome.info

    def close(self) -> None:
        self._simulator.close()


def installed(package: str, *settings: str) -> str:
    """Return the version of a package and the settings that change the rules, as FrameSpace needs them."""
    return " ".join((package, version(package), *settings))


def resize(frame: Frame, height: int, width: int) -> Frame:
    """Resize by area average, (H, W, C) -> (height, width, C). Needs Pillow."""
    from PIL import Image

    return np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BOX))
