"""Compare imagined with real rollouts of an agent and of random play that start in the same states.

The agent plays on for some steps; then a policy goes on in the simulator, and in worlds imagined from the last frames.
Policies of every quality are the agent with a share of random actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from tqdm import tqdm

from lab.estimates import interval95
from lab.pixels.playing import STEPS, Trained, load_agent, read_config
from loopwm.pixel.agents.actor_critic_learner import ActorCriticPlayer
from loopwm.pixel.gym import real_environments
from loopwm.pixel.imagined import EnvState, FrameWorld, ImaginedVectorEnv, Policy, RandomPolicy, rollout
from loopwm.pixel.replay import Replay, Segments
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace

REPLAYED = 4 * STEPS
"""Steps of each environment by the agent, at most: rollouts start from places of this play."""


@dataclass(frozen=True)
class Contexts:
    """Contexts (B, context) as a source of starts: row b of a vector of worlds starts in context b."""

    space: FrameSpace
    segments: Segments

    def sample(self, batch: int, length: int, generator: np.random.Generator, following: bool) -> Segments:
        """Return the first contexts. Worlds that restart get some, too: what follows a first end does not count."""
        return Segments(*(column[:batch, -length:] for column in vars(self.segments).values()))


def contexts(lead: Segments, now: EnvState, space: FrameSpace) -> Contexts:
    """Append the current frames to what the agent played: as a start, a segment ends with the current frame."""
    last = {name: column[:, -1:] for name, column in vars(lead).items()}
    last |= {"obs": now.obs[:, None], "first": now.first[:, None]}
    return Contexts(space, Segments(*(np.concatenate((vars(lead)[name], last[name]), 1) for name in last)))


def before_truncation(real: Segments) -> NDArray[np.bool_]:
    """Mark the steps (B, T) that are not after a truncation of the start's own episode: worlds imagine none."""
    cut = real.truncated & (real.terminated.cumsum(1) == 0)
    return cut.cumsum(1) - cut == 0


def outcomes(segments: Segments, within: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the reward up to the first end, and whether there was one, by row: (B, 2); steps `within` (B, T) count."""
    alive = within & (segments.terminated.cumsum(1) - segments.terminated == 0)
    ended = (segments.terminated & alive).any(1)
    return np.stack(((segments.reward * alive).sum(1), ended), 1).astype(np.float64)


def compare(real: NDArray[np.float64], imagined: NDArray[np.float64]) -> dict[str, Any]:
    """Return means and paired differences, imagined minus real, with 95 % intervals, of outcomes (rows, 2)."""
    difference, interval = (imagined - real).mean(0), interval95(imagined - real)
    return {
        name: {
            "real": float(real[:, i].mean()),
            "imagined": float(imagined[:, i].mean()),
            "gap": float(difference[i]),
            "ci95": interval[:, i].tolist(),
        }
        for i, name in enumerate(("reward", "ended"))
    }


class Noisy:
    """Policy that takes a random action in a share of the steps."""

    def __init__(self, policy: Policy, actions: int, share: float, seed: int) -> None:
        self._policy, self._actions, self._share = policy, actions, share
        self._rng = np.random.default_rng(seed)

    def __call__(self, obs: NDArray[Any], first: NDArray[Any], info: dict[str, Any]) -> NDArray[Any]:
        own, other = self._policy(obs, first, info), self._rng.integers(self._actions, size=len(obs))
        action = np.where(self._rng.random(len(obs)) < self._share, other, own)
        if isinstance(self._policy, ActorCriticPlayer):  # the world that it carries along needs the action taken
            self._policy.action = torch.from_numpy(action).to(self._policy.device)
        return action


def measure(folder: Path, rollouts: int, seed: int) -> dict[str, Any]:
    """Measure rewards and ends of rollouts of `imagination.steps` steps, in each environment `rollouts` times.

    Raises:
        InputError: the run is unfinished, or has no world
    """
    config = read_config(folder)
    env, space = real_environments(config.real.environment, config.real.count)
    agent = load_agent(folder, space, config)
    if agent.world is None:
        raise InputError(f"{folder}: the run has no world model")
    results: dict[str, Any] = {"run": str(folder), "starts": rollouts * env.num_envs, "steps": config.imagination.steps}
    gaps = measure_policies(agent, agent.world, env, space, (0.0, 1.0), rollouts, seed)
    return results | dict(zip(("agent", "random"), gaps, strict=True))


def measure_policies(
    agent: Trained,
    world: FrameWorld[Any],
    env: VectorEnv[Any, Any, Any],
    space: FrameSpace,
    shares: Sequence[float],
    rollouts: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Return what `compare` says of the agent with each of these shares of random actions; 1 is random play."""
    context, steps = agent.config.imagination.burn_in, agent.config.imagination.steps
    results = []
    for share in shares:
        rng, pairs = np.random.default_rng(seed), []
        for _ in tqdm(range(rollouts), unit="rollout", desc=f"{share:.0%} random"):
            start = int(rng.integers(2**31))
            player = agent.player(env.num_envs, start)
            lead = rollout(env, player, int(rng.integers(context, REPLAYED)), EnvState.reset(env, start))
            # Random actions are the same in both: what differs is the world's.
            going, dreaming = (
                (RandomPolicy(space.actions, np.random.default_rng(start)) for _ in range(2))
                if share == 1
                else (Noisy(p, space.actions, share, start) for p in (player, agent.player(env.num_envs, start)))
            )
            origin = contexts(lead.segments, lead.env_state, space)
            real = rollout(env, going, steps, lead.env_state).segments
            imagined, within = imagine(world, origin, dreaming, context, steps, start), before_truncation(real)
            pairs.append((outcomes(real, within), outcomes(imagined, within)))
        results.append(compare(*(np.concatenate(column) for column in zip(*pairs, strict=True))))
    return results


def pairs_in_order(real: Sequence[float], imagined: Sequence[float]) -> float:
    """Return the share of pairs of policies whose order in imagination is the real one; a tie in either is none."""
    pairs = list(combinations(range(len(real)), 2))
    return sum((real[i] - real[j]) * (imagined[i] - imagined[j]) > 0 for i, j in pairs) / len(pairs)


def imagine(world: FrameWorld[Any], origin: Contexts, policy: Policy, context: int, steps: int, seed: int) -> Segments:
    """Play in worlds imagined from contexts, one a row."""
    env: VectorEnv[Any, Any, Any] = ImaginedVectorEnv(
        world, cast("Replay", origin), len(origin.segments.action), context, horizon=steps + 1
    )
    return rollout(env, policy, steps, EnvState.reset(env, seed)).segments
