"""Rollout curve: imagined rewards, ends and whole frames of an agent's world against real play, by rollout step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.pixels.open_loop import means, open_loop_rollouts
from lab.pixels.playing import load_agent, read_config
from lab.pixels.reality_gap import REPLAYED
from loopwm.pixel.gym import real_environments
from loopwm.pixel.imagined import EnvState, rollout
from loopwm.pixel.replay import Replay
from loopwm.records.errors import InputError


def measure(folder: Path, count: int, steps: int, seed: int) -> dict[str, Any]:
    """Measure rows by rollout step (`age`; 0: all steps) of `count` rollouts in play unseen by the world.

    Raises:
        InputError: the run is unfinished, or has no world
    """
    config = read_config(folder)
    env, space = real_environments(config.real.environment, config.real.count)
    agent = load_agent(folder, space, config)
    if agent.world is None:
        raise InputError(f"{folder}: the run has no world model")
    played = rollout(env, agent.player(config.real.count, seed), REPLAYED, EnvState.reset(env, seed))
    replay = Replay(space, played.segments.action.size)
    replay.add_segments(played.segments, "agent", seed)
    rng = np.random.default_rng(seed)
    rollouts = open_loop_rollouts(
        agent.world, replay, count, config.imagination.burn_in, steps, rng, torch.device("cpu")
    )
    columns = {
        name: (means(rollouts.real, name, 0), means(rollouts.imagined, name, 0)) for name in ("reward", "end", "whole")
    }
    rows: list[dict[str, Any]] = [{"age": 0, "valid": int(rollouts.imagined["valid"].sum()), **rollouts.overall()}]
    for age in range(steps):
        row: dict[str, Any] = {"age": age + 1, "valid": int(rollouts.imagined["valid"][:, age].sum())}
        for name, (real, imagined) in columns.items():
            row |= {f"{name}_real": float(real[age]), f"{name}_imagined": float(imagined[age])}
        rows.append(row)
    return {"run": str(folder), "rollouts": count, "context": config.imagination.burn_in, "seed": seed, "rows": rows}
