"""Simulators as agents have them: rewards in a unit, and the simulator itself in place of a world, which tells a bad
world from a bad learner."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

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


class _Seen(NamedTuple):
    """A frame (B, H, W, C) of each environment, the action (B,) that led to it, and whether an episode begins, (B,)."""

    obs: Array
    action: Array
    first: Array


class Oracle(VectorEnv[Array, Array, Array]):
    """Simulators that go on where they stand when a new imagination begins: like imagined worlds they begin in the
    middle of episodes, and `info` shows the frames before."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - the base class declares it so

    def __init__(self, env: VectorEnv[Any, Any, Any], context: int) -> None:
        """context: how many frames `info` shows at most, the one that stands being the last of them. Raises ValueError
        for environments whose autoreset mode is not SAME_STEP."""
        if env.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
            raise ValueError(f"env: autoreset mode {env.metadata.get('autoreset_mode')}, expected SAME_STEP")
        self._env = env
        self._seen: deque[_Seen] = deque(maxlen=context)
        self.num_envs = env.num_envs
        self.single_observation_space, self.single_action_space = env.single_observation_space, env.single_action_space
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """The frames that stand; only the first call begins episodes."""
        if not self._seen:
            obs, info = self._env.reset(seed=seed)
            self._seen.append(_Seen(obs.copy(), np.zeros(self.num_envs, np.int64), np.ones(self.num_envs, bool)))
            return obs, info
        obs, action, first = (np.stack(column, 1) for column in zip(*self._seen, strict=True))
        return obs[:, -1], {"context_obs": obs, "context_action": action[:, 1:], "context_first": first}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        found = self._env.step(actions)
        self._seen.append(_Seen(found[0].copy(), np.asarray(actions, np.int64), found[2] | found[3]))
        return found
