"""Imagined worlds of frames, and the simulators of agents, as Gymnasium environments; torch is imported on creation.

import gymnasium, loopwm.pixel.gym  # registers loopwm/Imagined-v0

envs = gymnasium.make_vec("loopwm/Imagined-v0", num_envs=64)  # the packaged world of Catch
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from loopwm.records.errors import naming
from loopwm.records.frames import FrameSpace

if TYPE_CHECKING:
    from loopwm.pixel.imagined import ImaginedVectorEnv

FRAMES = "data_prep.environments.pixels.registered:loopwm/Frames-v0"
"""Gymnasium id of all frame simulators, after the module that registers them, which Gymnasium imports."""


def real_environments(name: str, count: int) -> tuple[VectorEnv[Any, Any, Any], FrameSpace]:
    """Build a vector of `count` environments; return it with its frame space.

    Raises InputError for an unknown name or a simulator that is not installed.
    """
    with naming("real.environment: "):
        env: Any = gymnasium.make_vec(FRAMES, num_envs=count, name=name)
    return env, env.envs[0].get_wrapper_attr("space")


def real_environment(name: str) -> Any:
    """Build one Gymnasium environment. Raises InputError as `real_environments`."""
    return gymnasium.make(FRAMES, name=name)


CATCH = Path(__file__).parent / "pretrained/catch"
"""Packaged world of Catch: a checkpoint, and a folder of episodes to start from."""


def world_folder(name: str | Path) -> Path:
    """Return the folder of a packaged world by its name, or the folder that is named."""
    return packaged if ((packaged := CATCH.parent / name) / "config.json").is_file() else Path(name)


def make_vector_env(
    num_envs: int = 1,
    checkpoint: str | Path = CATCH,
    starts: str | Path | None = None,
    context: int = 8,
    horizon: int = 50,
    sampling: dict[str, Any] | None = None,
    render_mode: str | None = None,
) -> ImaginedVectorEnv[Any]:
    """Make a vector of imagined worlds. Raises InputError for folders that do not fit each other.

    Args:
        num_envs: worlds
        checkpoint: folder of a pixel model, or the name of a packaged one
        starts: folder of recorded episodes to start in, None for `starts` in the checkpoint
        context: recorded frames that a world starts from
        horizon: steps before truncation
        sampling: keys of the section that differ from the checkpoint's
        render_mode: None or rgb_array
    """
    from loopwm.pixel.checkpoint import load_checkpoint
    from loopwm.pixel.imagined import ImaginedVectorEnv
    from loopwm.pixel.replay import Replay

    folder = world_folder(checkpoint)
    system, replay = load_checkpoint(folder), Replay.from_folder(Path(starts or folder / "starts"))
    world = system.world(system.sampling_with(sampling or {}))
    return ImaginedVectorEnv(world, replay, num_envs, context, horizon, render_mode=render_mode)


class ImaginedEnv(gymnasium.Env[NDArray[Any], Any]):
    """One imagined world, with the arguments of `make_vector_env`."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 - the base class declares it so

    def __init__(self, **arguments: Any) -> None:
        self._worlds = worlds = make_vector_env(1, **arguments)
        self.observation_space, self.action_space = worlds.single_observation_space, worlds.single_action_space
        self.render_mode, self._obs = worlds.render_mode, np.zeros(worlds.space.frame_shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._obs = self._worlds.reset(seed=seed)[0][0]
        return self._obs, {}

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, infos = self._worlds.step(np.asarray(action)[None])
        self._obs = infos["final_obs"][0] if "final_obs" in infos else obs[0]  # a vector restarts in the same step
        return self._obs, float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> Any:
        from loopwm.pixel.imagined import painted

        return None if self.render_mode is None else painted(self._obs)


gymnasium.register(
    "loopwm/Imagined-v0", entry_point=f"{__name__}:ImaginedEnv", vector_entry_point=f"{__name__}:make_vector_env"
)
