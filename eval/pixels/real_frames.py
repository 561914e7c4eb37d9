"""The real environments that agents over frames are measured in: simulators of `data_prep`."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import VectorEnv

from data_prep.environments.pixels import make_frame_vector
from data_prep.errors import DataError
from eval.errors import EvalError
from loopwm.pixel.frames import FrameSpace


def real_frames(name: str, count: int) -> tuple[VectorEnv[Any, Any, Any], FrameSpace]:
    """`count` environments as a vector, and what they show. Raises EvalError for a name that is unknown, or whose
    simulator is not installed."""
    try:
        env = make_frame_vector(name, count)
    except DataError as error:
        raise EvalError(str(error)) from error
    return env, env.envs[0].get_wrapper_attr("space")
