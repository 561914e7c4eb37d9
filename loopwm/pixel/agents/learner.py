"""Learner interface: an agent that plays, and learns from real and from imagined play.

A learner is a class of this protocol and one line of `LEARNERS` in `loopwm.pixel.registry`; it brings its sections of
the configuration. The trainer constructs it as Learner(config, space, width of a latent world's features or 0).
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
    """Random state of an agent's run, saved in checkpoints."""

    rng: np.random.Generator
    generator: torch.Generator

    @classmethod
    def of(cls, seed: int) -> Chance:
        return cls(np.random.default_rng(seed), torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Dream:
    """Imagination of a learner.

    env: vector of worlds
    world: the world model, None if `env` is the simulator itself
    replay: source of start positions
    """

    env: VectorEnv[Any, Any, Any]
    world: FrameWorld[Any] | None
    replay: Replay


class Learner(Protocol):
    sections: ClassVar[Mapping[str, type]]
    """Sections of the configuration by name: dataclasses."""

    def player(self, count: int, generator: torch.Generator, world: FrameWorld[Any] | None) -> Policy:
        """Return a policy for `count` real environments. world: for policies that act on its features."""

    def begin(self, count: int, chance: Chance, world: FrameWorld[Any] | None) -> None:
        """Begin play in `count` real environments with empty memories."""

    def play(self, env: VectorEnv[Any, Any, Any], steps: int, env_state: EnvState) -> Rollout:
        """Continue play in the real environments, and record the experience."""

    def learn_from_play(self, epochs: int, minibatches: int, chance: Chance) -> Numbers:
        """Learn from the last play; return diagnostics, empty for learners that only imagine."""

    def learn_from_imagination(self, dream: Dream, settings: Any, chance: Chance) -> Numbers:
        """Update once on imagined play. settings: section `imagination`.

        Returns diagnostics, with the mean `reward` of an imagined step and the share of steps that `ends`.
        """

    def to(self, device: torch.device) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def step_means(result: Rollout) -> Numbers:
    """Return the mean reward per step and the share of steps that end an episode or a life.

    Where these differ between imagination and the real environment, policies learn behaviour that does not transfer.
    """
    s = as_learned(result.segments)
    return {"reward": float(s.reward.mean()), "ends": float(s.terminated.mean())}
