"""PPO learner: a recurrent policy that learns from real play and from imagined frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from gymnasium.vector import VectorEnv

from loopwm.pixel.agents.collector import RolloutCollector, play
from loopwm.pixel.agents.learner import Chance, Dream, Numbers, step_means
from loopwm.pixel.agents.ppo import PPO, PPOConfig, Trajectories
from loopwm.pixel.agents.ppo_policy import ActorCritic, PolicyConfig
from loopwm.pixel.imagined import EnvState, FrameWorld, Rollout
from loopwm.records.frames import FrameSpace


class PPOLearner:
    """PPO as `Learner`. Imagined play has its own entropy coefficient."""

    sections: ClassVar[Mapping[str, type]] = {"policy": PolicyConfig, "ppo": PPOConfig}

    def __init__(self, config: Any, space: FrameSpace, width: int) -> None:
        self.policy = ActorCritic(config.policy, space.frame_shape, space.actions)
        self.ppo = PPO(self.policy, config.ppo)
        self.deviation: float | None = None
        """Standard deviation of the last real play's advantages, the unit of imagined ones."""
        self._player: RolloutCollector | None = None
        self._played: Trajectories | None = None

    def player(self, count: int, generator: torch.Generator, world: FrameWorld[Any] | None) -> RolloutCollector:
        return RolloutCollector(self.policy, count, generator)

    def begin(self, count: int, chance: Chance, world: FrameWorld[Any] | None) -> None:
        self._player = RolloutCollector(self.policy, count, chance.generator)

    def play(self, env: VectorEnv[Any, Any, Any], steps: int, env_state: EnvState) -> Rollout:
        assert self._player is not None
        self._played, result = play(env, self._player, steps, env_state)
        return result

    def learn_from_play(self, epochs: int, minibatches: int, chance: Chance) -> Numbers:
        assert self._played is not None
        diagnostics = self.ppo.update(self._played, epochs, minibatches, chance.generator)
        self.deviation = diagnostics["advantage_deviation"]
        return diagnostics

    def learn_from_imagination(self, dream: Dream, settings: Any, chance: Chance) -> Numbers:
        """Update once on a rollout of fresh worlds."""
        env_state = EnvState.reset(dream.env, int(chance.rng.integers(2**31)))
        data, result = play(
            dream.env, RolloutCollector(self.policy, settings.count, chance.generator), settings.steps, env_state
        )
        real, self.ppo.config = self.ppo.config, replace(self.ppo.config, entropy_coef=settings.entropy_coef)
        update = self.ppo.update(data, settings.epochs, settings.minibatches, chance.generator, self.deviation)
        self.ppo.config = real
        return update | step_means(result)

    def to(self, device: torch.device) -> None:
        self.policy.to(device)

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.ppo.optimizer.state_dict(),
            "scale": self.ppo.scale.state_dict(),
            "deviation": self.deviation,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.ppo.optimizer.load_state_dict(state["optimizer"])
        self.ppo.scale.load_state_dict(state["scale"])
        self.deviation = state["deviation"]
