"""Real environments of agents, built by Gymnasium."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace

FRAMES = "data_prep.environments.pixels.registered:loopwm/Frames-v0"
"""Gymnasium id of all frame simulators, after the module that registers them, which Gymnasium imports."""


def real_environments(name: str, count: int) -> tuple[VectorEnv[Any, Any, Any], FrameSpace]:
    """Build a vector of `count` environments; return it with its frame space.

    Raises InputError for an unknown name or a simulator that is not installed.
    """
    try:
        env: Any = gymnasium.make_vec(FRAMES, num_envs=count, name=name)
    except InputError as error:
        raise InputError(f"real.environment: {error}") from error
    return env, env.envs[0].get_wrapper_attr("space")


def real_environment(name: str) -> Any:
    """Build one Gymnasium environment. Raises InputError as `real_environments`."""
    return gymnasium.make(FRAMES, name=name)
