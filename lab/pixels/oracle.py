"""Train an agent in the simulator itself instead of imagined worlds: separates a bad world from a bad learner.

python -m lab pixels oracle --config configs/studies/oracle-catch.yaml --out runs/oracle-catch
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from loopwm.pixel.agents.agent_trainer import AgentTrainer, in_unit
from loopwm.pixel.agents.config import AgentConfig, agent_config
from loopwm.pixel.agents.learner import Dream, Numbers
from loopwm.pixel.gym import real_environments
from loopwm.records.config import read_sections
from loopwm.records.frames import FrameSpace

Array = NDArray[Any]


class _Observed(NamedTuple):
    """Frames (B, H, W, C), the actions (B,) that led to them, and True where an episode begins, (B,)."""

    obs: Array
    action: Array
    first: Array


class Oracle(VectorEnv[Array, Array, Array]):
    """Simulators that continue when a new imagination begins.

    Like imagined worlds they start in the middle of episodes, and `info` contains the frames before.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - the base class declares it so

    def __init__(self, env: VectorEnv[Any, Any, Any], context: int) -> None:
        """Wrap the simulators.

        Args:
            env: vector of simulators
            context: maximum number of frames in `info`, the current one last

        Raises:
            ValueError: the autoreset mode of `env` is not SAME_STEP
        """
        if env.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
            raise ValueError(f"env: autoreset mode must be SAME_STEP, got {env.metadata.get('autoreset_mode')}")
        self._env = env
        self._history: deque[_Observed] = deque(maxlen=context)
        self.num_envs = env.num_envs
        self.single_observation_space, self.single_action_space = env.single_observation_space, env.single_action_space
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Return the current frames; only the first call begins episodes."""
        if not self._history:
            obs, info = self._env.reset(seed=seed)
            self._history.append(_Observed(obs.copy(), np.zeros(self.num_envs, np.int64), np.ones(self.num_envs, bool)))
            return obs, info
        obs, action, first = (np.stack(column, 1) for column in zip(*self._history, strict=True))
        return obs[:, -1], {"context_obs": obs, "context_action": action[:, 1:], "context_first": first}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        outcome = self._env.step(actions)
        self._history.append(_Observed(outcome[0].copy(), np.asarray(actions, np.int64), outcome[2] | outcome[3]))
        return outcome


class OracleTrainer(AgentTrainer):
    """Trainer whose imagination is the simulator."""

    needs_world = False

    def __init__(
        self,
        config: AgentConfig,
        env: VectorEnv[Any, Any, Any],
        space: FrameSpace,
        folder: Path,
        oracle: VectorEnv[Any, Any, Any],
    ) -> None:
        """Create or resume a run. oracle: `config.imagination.count` environments besides the real ones."""
        self._oracle = Oracle(in_unit(oracle, config.real.rewards), config.imagination.burn_in)
        super().__init__(config, env, space, folder)

    def _learn_from_imagination(self) -> list[Numbers]:
        c, dream = self.config.imagination, Dream(self._oracle, None, self.replay)
        return [self.learner.learn_from_imagination(dream, c, self.chance) for _ in range(c.updates)]


def train(config_file: Path, overrides: Sequence[str], out: Path) -> None:
    """Train by a configuration of an agent without a world. Raises InputError."""
    config = agent_config(read_sections(config_file, overrides))
    name = config.real.environment
    env, space = real_environments(name, config.real.count)
    oracle, _ = real_environments(name, config.imagination.count)
    OracleTrainer(config, env, space, out, oracle).run()
