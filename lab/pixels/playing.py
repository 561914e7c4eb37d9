"""Play an agent in its real environment: returns and Crafter score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from tqdm import tqdm

from lab.estimates import interval95
from loopwm.pixel.agents.agent_trainer import LEARNER
from loopwm.pixel.agents.config import AgentConfig, agent_config
from loopwm.pixel.agents.learner import Learner
from loopwm.pixel.checkpoint import load_checkpoint
from loopwm.pixel.gym import real_environments
from loopwm.pixel.imagined import EnvState, FrameWorld, Policy, RandomPolicy, rollout
from loopwm.pixel.registry import LEARNERS, named
from loopwm.records.config import read_sections
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace

ACHIEVEMENTS, METRIC = "achievements", "metric"
"""Keys of episode infos: achievements reached, and the environment's own metric."""

STEPS = 64
"""Steps of each environment between counts of ended episodes."""


@dataclass(frozen=True)
class Played:
    """Statistics of a policy's episodes in the real environment.

    score: Crafter score, None elsewhere
    """

    episodes: int
    steps: int
    mean_return: float
    low: float
    high: float
    score: float | None
    achievements: tuple[float, ...]
    """Share of episodes that reached each."""
    metric: float | None = None
    """Mean over episodes of the environment's own metric, if it has one."""


def crafter_score(rates: Sequence[float]) -> float:
    """Return the geometric mean of success rates as Crafter defines it, in percent: exp(mean(log(1 + 100 s))) - 1."""
    return float(np.exp(np.mean(np.log1p(100 * np.asarray(rates)))) - 1)


def play_real(env: VectorEnv[Any, Any, Any], policy: Policy, episodes: int, seed: int) -> Played:
    """Play the first `episodes` to begin, so that long ones count as often as short ones."""
    env_state = EnvState.reset(env, seed)
    running, count = np.zeros(env.num_envs), 0
    started, order = env.num_envs, np.arange(env.num_envs)
    returns: dict[int, float] = {}
    reached: dict[int, NDArray[np.bool_]] = {}
    judged: dict[int, float] = {}
    with tqdm(total=episodes, unit="episode", desc="real") as bar:
        while any(number not in returns for number in range(episodes)):
            result = rollout(env, policy, STEPS, env_state)
            env_state, s = result.env_state, result.segments
            count += s.reward.size
            for step in range(STEPS):
                running += s.reward[:, step]
                for row in np.flatnonzero(s.terminated[:, step] | s.truncated[:, step]).tolist():
                    number = int(order[row])
                    returns[number] = float(running[row])
                    if ACHIEVEMENTS in (info := result.endings[row, step]):
                        reached[number] = np.asarray(info[ACHIEVEMENTS]) > 0
                    if METRIC in info:
                        judged[number] = float(info[METRIC])
                    running[row], order[row], started = 0, started, started + 1  # the next episode begins here
                    bar.update(number < episodes)
    values = np.array([returns[number] for number in range(episodes)])
    low, high = interval95(values[:, None])[:, 0].tolist()
    rates = np.mean([reached[n] for n in range(episodes)], 0).tolist() if reached else []
    score = crafter_score(rates) if rates else None
    metric = float(np.mean([judged[n] for n in range(episodes)])) if judged else None
    return Played(episodes, count, float(values.mean()), low, high, score, tuple(rates), metric)


@dataclass(frozen=True)
class Trained:
    """Agent of a run folder. world: None if it was trained on real play only."""

    config: AgentConfig
    learner: Learner
    world: FrameWorld[Any] | None

    def player(self, count: int, seed: int) -> Policy:
        return self.learner.player(count, torch.Generator().manual_seed(seed), self.world)


def load_agent(folder: Path, space: FrameSpace, config: AgentConfig) -> Trained:
    """Load an agent. Raises InputError for a run that has not saved one."""
    path = folder / LEARNER
    if not path.is_file():
        raise InputError(f"{path}: no such file; the run has saved nothing yet")
    system = load_checkpoint(folder / "model", config.of_system) if config.has_world else None
    learner: Learner = named(LEARNERS, config.learner, "learner")(config, space, system.width if system else 0)
    learner.load_state_dict(torch.load(path, map_location="cpu", weights_only=False))
    return Trained(config, learner, system.world(config.sampling) if system else None)


def read_config(folder: Path) -> AgentConfig:
    """Read the configuration. Raises InputError for a folder that is not a run of an agent."""
    path = folder / "config.yaml"
    sections = read_sections(path)
    try:
        return agent_config(sections)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def evaluate(folder: Path, episodes: int, seed: int) -> dict[str, Any]:
    """Evaluate a finished run: returns of its agent and of random play."""
    config = read_config(folder)
    env, space = real_environments(config.real.environment, config.real.count)
    agent = load_agent(folder, space, config)
    chance = RandomPolicy(space.actions, np.random.default_rng(seed))
    results: dict[str, Any] = {"run": str(folder), "environment": space.env}
    results["random"] = asdict(play_real(env, chance, episodes, seed))
    results["agent"] = asdict(play_real(env, agent.player(config.real.count, seed), episodes, seed))
    return results
