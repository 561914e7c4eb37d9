"""The real environments of agents: simulators of `data_prep`."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import VectorEnv

from data_prep.environments.pixels.by_name import make_frame_environment, make_frame_vector
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace


def real_environments(name: str, count: int) -> tuple[VectorEnv[Any, Any, Any], FrameSpace]:
    """`count` environments as a vector, and what they show. Raises InputError for a name that is unknown, or whose
    simulator is not installed."""
    try:
        env = make_frame_vector(name, count)
    except InputError as error:
        raise InputError(f"real.environment: {error}") from error
    return env, env.envs[0].get_wrapper_attr("space")


def real_environment(name: str) -> Any:
    """One of them, a Gymnasium environment. Raises InputError as `real_environments` does."""
    return make_frame_environment(name)
