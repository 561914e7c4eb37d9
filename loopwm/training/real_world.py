"""The real environments of agents, which Gymnasium makes."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace

FRAMES = "data_prep.environments.pixels.registered:loopwm/Frames-v0"
"""The Gymnasium id of all simulators of frames, before it the module that registers them, which Gymnasium imports."""


def real_environments(name: str, count: int) -> tuple[VectorEnv[Any, Any, Any], FrameSpace]:
    """`count` environments as a vector, and what they show. Raises InputError for a name that is unknown, or whose
    simulator is not installed."""
    try:
        env: Any = gymnasium.make_vec(FRAMES, num_envs=count, name=name)
    except InputError as error:
        raise InputError(f"real.environment: {error}") from error
    return env, env.envs[0].get_wrapper_attr("space")


def real_environment(name: str) -> Any:
    """One of them, a Gymnasium environment. Raises InputError as `real_environments` does."""
    return gymnasium.make(FRAMES, name=name)
