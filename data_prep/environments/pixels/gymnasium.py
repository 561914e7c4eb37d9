"""Simulators that come as Gymnasium environments: MiniGrid and ViZDoom, at 64 x 64 pixels."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from data_prep.environments.pixels.base import Frame, Outcome, installed, missing, resize
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace

PIXELS = 64
TILE = 8
"""Pixels of a MiniGrid tile."""

SKIP = 4
SCENARIOS = {
    "basic": "VizdoomBasic-v1",
    "deadly_corridor": "VizdoomDeadlyCorridor-v1",
    "defend_the_center": "VizdoomDefendCenter-v1",
    "health_gathering": "VizdoomHealthGathering-v1",
    "predict_position": "VizdoomPredictPosition-v1",
}


class MiniGrid:
    """What the agent sees of a grid: 7 x 7 tiles of 8 x 8 pixels, with a black border of 8 on the right and below, so
    that tiles keep to multiples of 8. Action 6 does nothing in the Memory environments."""

    def __init__(self, task: str) -> None:
        """task: as in MemoryS7. Raises InputError for an unknown one."""
        try:
            from minigrid.wrappers import ImgObsWrapper, RGBImgPartialObsWrapper
        except ModuleNotFoundError as error:
            raise missing("minigrid", error) from error
        known = [name.removeprefix("MiniGrid-").removesuffix("-v0") for name in gymnasium.registry if "Grid-" in name]
        if task not in known:
            raise InputError(f"minigrid: unknown task {task!r}, expected one of {', '.join(sorted(known))}")
        env = gymnasium.make(f"MiniGrid-{task}-v0")
        self._env = ImgObsWrapper(RGBImgPartialObsWrapper(env, tile_size=TILE))
        version = installed("minigrid")
        self.space = FrameSpace(f"minigrid/{task}", version, (PIXELS, PIXELS, 3), int(env.action_space.n))  # type: ignore[attr-defined]

    def begin(self, seed: int) -> tuple[Frame, dict[str, Any]]:
        return _padded(self._env.reset(seed=seed)[0]), {}

    def act(self, action: int) -> Outcome:
        view, reward, terminated, truncated, _ = self._env.step(action)
        return Outcome(_padded(view), float(reward), terminated, truncated)

    def close(self) -> None:
        self._env.close()


def _padded(view: Frame) -> Frame:
    frame = np.zeros((PIXELS, PIXELS, 3), np.uint8)
    frame[: view.shape[0], : view.shape[1]] = view
    return frame


class VizDoom:
    """A scenario with its own rewards, four tics an action, one button at a time or none. The simulator shows no frame
    at the end of an episode: the one before stands again."""

    def __init__(self, scenario: str) -> None:
        """Raises InputError for an unknown scenario."""
        try:
            import vizdoom.gymnasium_wrapper  # noqa: F401 - registers the environments
        except ModuleNotFoundError as error:
            raise missing("vizdoom", error) from error
        if scenario not in SCENARIOS:
            raise InputError(f"vizdoom: unknown scenario {scenario!r}, expected one of {', '.join(SCENARIOS)}")
        self._env = gymnasium.make(SCENARIOS[scenario], frame_skip=SKIP, max_buttons_pressed=1)
        self._frame = np.zeros((PIXELS, PIXELS, 3), np.uint8)
        version, actions = installed("vizdoom", f"skip={SKIP}"), int(self._env.action_space.n)  # type: ignore[attr-defined]
        self.space = FrameSpace(f"vizdoom/{scenario}", version, self._frame.shape, actions)

    def begin(self, seed: int) -> tuple[Frame, dict[str, Any]]:
        self._frame = resize(self._env.reset(seed=seed)[0]["screen"], PIXELS, PIXELS)
        return self._frame, {}

    def act(self, action: int) -> Outcome:
        seen, reward, terminated, truncated, _ = self._env.step(action)
        if not (terminated or truncated):
            self._frame = resize(seen["screen"], PIXELS, PIXELS)
        return Outcome(self._frame, float(reward), terminated and not truncated, truncated)

    def close(self) -> None:
        self._env.close()
