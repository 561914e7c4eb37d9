"""What an agent is to the loop that trains it: something that plays, and learns from real play and from imagination.

A learner is a class of this protocol and one line of `LEARNERS` in `loopwm.pixel.registry`; the sections of
configuration that it needs come with it. It is made as Learner(config, space, width): width is that of a latent world's
features, 0 for a world that shows frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from gymnasium.vector import VectorEnv

from loopwm.pixel.imagined import EnvState, FrameWorld, Policy, Rollout
from loopwm.pixel.replay import Replay, as_learned

Numbers = dict[str, float]


@dataclass
class Chance:
    """All randomness of an agent's run; it is saved and comes back."""

    rng: np.random.Generator
    generator: torch.Generator

    @classmethod
    def of(cls, seed: int) -> Chance:
        return cls(np.random.default_rng(seed), torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Dream:
    """Where a learner imagines. env: a vector of imagined worlds, or, for an oracle, of the simulator itself;
    world: what is behind them, None for an oracle; replay: places to begin from."""

    env: VectorEnv[Any, Any, Any]
    world: FrameWorld[Any] | None
    replay: Replay


class Learner(Protocol):
    sections: ClassVar[Mapping[str, type]]
    """Of the configuration, by name: dataclasses."""

    def player(self, count: int, generator: torch.Generator, world: FrameWorld[Any] | None) -> Policy:
        """Plays `count` real environments, to be measured. world: for those that carry it along."""
        ...

    def begin(self, count: int, chance: Chance, world: FrameWorld[Any] | None) -> None:
        """`count` real environments begin anew: memories are empty."""
        ...

    def play(self, env: VectorEnv[Any, Any, Any], steps: int, env_state: EnvState) -> Rollout:
        """Plays on in the real environments, and keeps what is to be learned from that."""
        ...

    def learn_from_play(self, epochs: int, minibatches: int, chance: Chance) -> Numbers:
        """Learns from what was played last; empty for learners that only imagine."""
        ...

    def learn_from_imagination(self, dream: Dream, settings: Any, chance: Chance) -> Numbers:
        """One update on imagined play. settings: the section `imagination`. Diagnostics, with the mean `reward` of an
        imagined step and the share of steps that `ends`."""
        ...

    def to(self, device: torch.device) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def a_step(found: Rollout) -> Numbers:
    """Reward of a step in the mean, and how many end an episode or a life: where imagination differs from the real
    environment, policies learn what does not hold."""
    s = as_learned(found.segments)
    return {"reward": float(s.reward.mean()), "ends": float(s.terminated.mean())}
