"""Simulators as agents have them: rewards in a unit, and the simulator itself in place of a world, which tells a bad
world from a bad learner."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from numpy.typing import NDArray

from loopwm.pixel.replay import RewardUnit

Array = NDArray[Any]


class SignedRewards(VectorWrapper):
    """The same environments with signs for rewards."""

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        obs, reward, *rest = self.env.step(actions)
        return (obs, np.sign(reward), *rest)


def in_unit(env: VectorEnv[Any, Any, Any], unit: RewardUnit) -> VectorEnv[Any, Any, Any]:
    """The environments with rewards in this unit."""
    return env if unit == "raw" else SignedRewards(env)


class Oracle(VectorEnv[Array, Array, Array]):
    """Simulators that go on where they stand when a new imagination begins: worlds begin in the middle of episodes."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - the base class declares it so

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        """Raises ValueError for environments whose autoreset mode is not SAME_STEP."""
        if env.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
            raise ValueError(f"env: autoreset mode {env.metadata.get('autoreset_mode')}, expected SAME_STEP")
        self._env = env
        self._obs: Array | None = None
        self.num_envs = env.num_envs
        self.single_observation_space, self.single_action_space = env.single_observation_space, env.single_action_space
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """The frames that stand; only the first call begins episodes."""
        if self._obs is None:
            self._obs, _ = self._env.reset(seed=seed)
        return self._obs, {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        found = self._env.step(actions)
        self._obs = found[0].copy()
        return found
