"""Compare rewards and ends of imagined and real rollouts of an agent and of random play."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from tqdm import tqdm

from eval.pixels.playing import STEPS, Trained, load_agent, read_config
from loopwm.pixel.imagined import EnvState, ImaginedVectorEnv, Policy, RandomPolicy, Rollout, rollout
from loopwm.pixel.replay import Replay, as_learned
from loopwm.records.errors import InputError
from loopwm.training.real_world import real_environments

REPLAYED = 4 * STEPS
"""Steps of each environment by the agent: rollouts start from places of this play, imagined and real."""


@dataclass(frozen=True)
class RolloutStats:
    """Statistics of rollouts from given places.

    reward: mean sum up to the first end
    ended: share of rollouts that ended; a world that misses real ends trains agents that do not avoid them
    """

    reward: float
    ended: float

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> RolloutStats:
        reward, terminated = (
            np.concatenate([getattr(rollout.segments, name) for rollout in rollouts])
            for name in ("reward", "terminated")
        )
        alive = terminated.cumsum(1) - terminated == 0
        return cls(float((reward * alive).sum(1).mean()), float(terminated.any(1).mean()))


def play_imagined(agent: Trained, policy: Policy, replay: Replay, rollouts: int, seed: int) -> list[Rollout]:
    """Play in worlds imagined from the replay."""
    assert agent.world is not None
    c = agent.config.imagination
    env = ImaginedVectorEnv(agent.world, replay, c.count, c.burn_in, horizon=c.steps + 1)
    rng = np.random.default_rng(seed)
    return [
        rollout(env, policy, c.steps, EnvState.reset(env, int(rng.integers(2**31))))
        for _ in tqdm(range(rollouts), unit="rollout", desc="imagined")
    ]


def play_on(
    env: VectorEnv[Any, Any, Any], agent: Policy, policy: Policy, steps: int, rollouts: int, seed: int
) -> list[Rollout]:
    """Play a policy in the real environment from random places of the agent's play."""
    rng, rollouts_played = np.random.default_rng(seed), []
    for _ in tqdm(range(rollouts), unit="rollout", desc="real"):
        lead, env_state = int(rng.integers(1, REPLAYED)), EnvState.reset(env, int(rng.integers(2**31)))
        rollouts_played.append(rollout(env, policy, steps, rollout(env, agent, lead, env_state).env_state))
    return rollouts_played


def measure(folder: Path, rollouts: int, seed: int) -> dict[str, Any]:
    """Measure mean reward and ends per step of the agent's play, real and imagined, and rollouts from places of it.

    Raises:
        InputError: the run is unfinished, or has no world
    """
    config = read_config(folder)
    env, space = real_environments(config.real.environment, config.real.count)
    agent = load_agent(folder, space, config)
    if agent.world is None:
        raise InputError(f"{folder}: the run has no world model")
    c, chance = config.imagination, RandomPolicy(space.actions, np.random.default_rng(seed))
    player, dreamer = agent.player(config.real.count, seed), agent.player(c.count, seed)
    replay = Replay(space, env.num_envs * REPLAYED)
    play = rollout(env, player, REPLAYED, EnvState.reset(env, seed)).segments
    replay.add_segments(play, "agent", seed)
    imagined = play_imagined(agent, dreamer, replay, rollouts, seed)
    results: dict[str, Any] = {
        "run": str(folder),
        "real_reward": float(play.reward.mean()),
        "real_ends": float(as_learned(play).terminated.mean()),
        "imagined_reward": float(np.mean([rollout.segments.reward for rollout in imagined])),
        "imagined_ends": float(np.mean([rollout.segments.terminated for rollout in imagined])),
    }
    blind = play_imagined(agent, chance, replay, rollouts, seed)
    for name, policy, dreamed in (("agent", player, imagined), ("random", chance, blind)):
        played = play_on(env, player, policy, c.steps, rollouts, seed)
        results[f"{name}_rollouts"] = {
            "real": asdict(RolloutStats.of(played)),
            "imagined": asdict(RolloutStats.of(dreamed)),
        }
    return results
