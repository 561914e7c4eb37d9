"""A recurrent policy that plays, real or imagined, and what it needs to learn from that.

Shape suffixes: B environments, T steps, H/W/C frame, Y memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from loopwm.pixel.agents.ppo import Trajectories
from loopwm.pixel.agents.ppo_policy import ActorCritic, sample_action
from loopwm.pixel.imagined import EnvState, Rollout, rollout
from loopwm.pixel.replay import Segments, as_learned

Array = NDArray[Any]


@dataclass(frozen=True)
class _Taken:
    """One step as the policy saw it, (B, ...) each."""

    fresh: Tensor
    log_p: Tensor
    value: Tensor
    memory: Tensor
    """After the frame was read."""


class RolloutCollector:
    """Plays a vector of environments, one memory each, and keeps what it did since the last `taken`.

    An imagined world begins in the middle of an episode: its memory is warmed up on the frames before.
    """

    def __init__(self, policy: ActorCritic, count: int, generator: torch.Generator) -> None:
        self.policy, self.generator = policy, generator
        self.device = next(policy.parameters()).device
        self.memory = policy.initial(count, self.device)
        self._taken: list[_Taken] = []

    @torch.no_grad()
    def __call__(self, obs: Array, first: Array, info: dict[str, Any]) -> Array:
        """As `Policy`."""
        fresh = self._fresh(first, info)
        began = torch.from_numpy(first).to(self.device)
        out = self.policy.step(self._tensor(obs), torch.where(began[:, None], fresh, self.memory))
        action, log_p = sample_action(out.logits.cpu(), self.generator)
        self.memory = out.memory
        self._taken.append(_Taken(fresh, log_p.to(self.device), out.value, out.memory))
        return action.numpy()

    def _fresh(self, first: Array, info: dict[str, Any]) -> Tensor:
        """(B, Y): the memory of environments that begin, after the frames before the one they show; zero elsewhere."""
        fresh = self.policy.initial(len(first), self.device)
        rows = np.flatnonzero(first)
        if len(rows) and "context_obs" in info and info["context_obs"].shape[1] > 1:
            before = self._tensor(info["context_obs"][rows, :-1])
            began = torch.from_numpy(info["context_first"][rows, :-1]).to(self.device)
            nothing = self.policy.initial(len(rows), self.device)
            warmed = self.policy(before, began, nothing, nothing[:, None].expand(-1, began.shape[1], -1))
            resets = torch.from_numpy(info["context_first"][rows, -1]).to(self.device)
            fresh[torch.from_numpy(rows).to(self.device)] = warmed.memory.masked_fill(resets[:, None], 0)
        return fresh

    def _tensor(self, frames: Array) -> Tensor:
        return torch.from_numpy(frames).to(self.device)

    def taken(self) -> list[_Taken]:
        """The steps since the last call."""
        steps, self._taken = self._taken, []
        return steps

    @torch.no_grad()
    def judge(self, obs: Array, memory: Tensor) -> Tensor:
        """Values (B,) of frames seen with a memory (B, Y) behind them, which stays as it is."""
        return self.policy.step(self._tensor(obs), memory).value


def play(
    env: VectorEnv[Any, Any, Any], player: RolloutCollector, steps: int, env_state: EnvState
) -> tuple[Trajectories, Rollout]:
    """Play on from a state of the environments; return what to learn from and the rollout."""
    memory = player.memory
    found = rollout(env, player, steps, env_state)
    taken, s = player.taken(), as_learned(found.segments)
    value = torch.stack([step.value for step in taken], 1)
    tensors = {
        name: torch.from_numpy(getattr(s, name)).to(player.device)
        for name in ("obs", "first", "action", "reward", "terminated", "truncated")
    }
    trajectories = Trajectories(
        **tensors,
        log_p=torch.stack([step.log_p for step in taken], 1),
        value=value,
        next_value=_next_values(player, s, value, taken),
        memory=memory,
        fresh=torch.stack([step.fresh for step in taken], 1),
    )
    return trajectories, found


def _next_values(player: RolloutCollector, s: Segments, value: Tensor, taken: list[_Taken]) -> Tensor:
    """(B, T): the value of what each step led to; where an episode ends, of its own last frame."""
    last_step = np.zeros_like(s.truncated)
    last_step[:, -1] = True
    bootstrapped = (s.truncated | last_step) & ~s.terminated
    after = torch.cat((value[:, 1:], torch.zeros_like(value[:, :1])), 1)
    for t in np.flatnonzero(bootstrapped.any(0)):
        rows = np.flatnonzero(bootstrapped[:, t])
        places = torch.from_numpy(rows).to(player.device)
        after[places, t] = player.judge(s.next_obs[rows, t], taken[t].memory[places])
    return after
