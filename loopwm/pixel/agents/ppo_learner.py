"""PPO learner: a recurrent policy that records its play and learns from it, real and imagined.

Shape suffixes: B environments, T steps, H/W/C frame, Y memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from loopwm.pixel.agents.learner import Chance, Dream, Numbers, step_means
from loopwm.pixel.agents.ppo import PPO, PPOConfig, Trajectories
from loopwm.pixel.agents.ppo_policy import ActorCritic, PolicyConfig, sample_action
from loopwm.pixel.imagined import EnvState, FrameWorld, Rollout, rollout
from loopwm.pixel.replay import Segments, as_learned
from loopwm.records.frames import FrameSpace

Array = NDArray[Any]


@dataclass(frozen=True)
class _RecordedStep:
    """Recorded step, (B, ...) each."""

    fresh: Tensor
    log_p: Tensor
    value: Tensor
    memory: Tensor
    """Memory after the frame."""


class RolloutCollector:
    """Recurrent policy for a vector of environments that records its steps; `play` takes them away.

    An imagined world begins in the middle of an episode: its memory is warmed up on the context frames.
    """

    def __init__(self, policy: ActorCritic, count: int, generator: torch.Generator) -> None:
        self.policy, self.generator = policy, generator
        self.device = next(policy.parameters()).device
        self.memory = policy.initial(count, self.device)
        self.steps: list[_RecordedStep] = []

    @torch.no_grad()
    def __call__(self, obs: Array, first: Array, info: dict[str, Any]) -> Array:
        fresh = self._fresh(first, info)
        began = torch.from_numpy(first).to(self.device)
        out = self.policy.step(self._tensor(obs), torch.where(began[:, None], fresh, self.memory))
        action, log_p = sample_action(out.logits.cpu(), self.generator)  # the generator is the CPU's
        self.memory = out.memory
        self.steps.append(_RecordedStep(fresh, log_p.to(self.device), out.value, out.memory))
        return action.numpy()

    def _fresh(self, first: Array, info: dict[str, Any]) -> Tensor:
        """Return the memory (B, Y) of environments that begin, after their context frames; zero elsewhere."""
        fresh = self.policy.initial(len(first), self.device)
        rows = np.flatnonzero(first)
        if len(rows) and "context_obs" in info and info["context_obs"].shape[1] > 1:
            before = self._tensor(info["context_obs"][rows, :-1])
            first_rows = torch.from_numpy(info["context_first"][rows, :-1]).to(self.device)
            empty = self.policy.initial(len(rows), self.device)
            warmed = self.policy(before, first_rows, empty, empty[:, None].expand(-1, first_rows.shape[1], -1))
            resets = torch.from_numpy(info["context_first"][rows, -1]).to(self.device)
            fresh[torch.from_numpy(rows).to(self.device)] = warmed.memory.masked_fill(resets[:, None], 0)
        return fresh

    def _tensor(self, frames: Array) -> Tensor:
        return torch.from_numpy(frames).to(self.device)


def play(
    env: VectorEnv[Any, Any, Any], player: RolloutCollector, steps: int, env_state: EnvState
) -> tuple[Trajectories, Rollout]:
    """Play on from a state of the environments; return what to learn from and the rollout."""
    memory = player.memory
    result = rollout(env, player, steps, env_state)
    records, player.steps, s = player.steps, [], as_learned(result.segments)
    value = torch.stack([step.value for step in records], 1)
    tensors = {
        name: torch.from_numpy(getattr(s, name)).to(player.device)
        for name in ("obs", "first", "action", "reward", "terminated", "truncated")
    }
    trajectories = Trajectories(
        **tensors,
        log_p=torch.stack([step.log_p for step in records], 1),
        value=value,
        next_value=_next_values(player, s, value, records),
        memory=memory,
        fresh=torch.stack([step.fresh for step in records], 1),
    )
    return trajectories, result


@torch.no_grad()
def _next_values(player: RolloutCollector, s: Segments, value: Tensor, records: list[_RecordedStep]) -> Tensor:
    """Return the value (B, T) after each step; where an episode ends, of its own last frame."""
    # The last step bootstraps too: its next frame is not in the rollout, so it is evaluated separately.
    last_step = np.zeros_like(s.truncated)
    last_step[:, -1] = True
    bootstrapped = (s.truncated | last_step) & ~s.terminated  # a terminated step has no value after it
    after = torch.cat((value[:, 1:], torch.zeros_like(value[:, :1])), 1)
    for t in np.flatnonzero(bootstrapped.any(0)):
        rows = np.flatnonzero(bootstrapped[:, t])
        places = torch.from_numpy(rows).to(player.device)
        last = torch.from_numpy(s.next_obs[rows, t]).to(player.device)
        after[places, t] = player.policy.step(last, records[t].memory[places]).value
    return after


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
