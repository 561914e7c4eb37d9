"""Package the world of an agent's run: its checkpoint, places to start in, and a card of what it gets wrong.

The card compares imagined with real rollouts of the same actions from the same places, by age, in random
play and in the agent's, of other seeds than the run's; and it says whether imagination ranks policies as the game does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv

from eval.pixels.playing import load_agent, read_config
from lab.pixels.open_loop import means, open_loop_rollouts
from lab.pixels.reality_gap import measure_policies, pairs_in_order
from loopwm.pixel.checkpoint import load_checkpoint, save_checkpoint
from loopwm.pixel.gym import real_environments
from loopwm.pixel.imagined import EnvState, FrameWorld, Policy, RandomPolicy, rollout
from loopwm.pixel.replay import Replay
from loopwm.records.errors import InputError
from loopwm.records.files import write_json
from loopwm.records.frames import FrameSpace, write_episode

STEPS = 400
"""Steps of each real environment that rollouts start in."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Random actions of the policies that are ranked."""


def package(folder: Path, out: Path, starts: int, rollouts: int, ages: int, seed: int) -> dict[str, Any]:
    """Write the folder `out`; return the card.

    Args:
        folder: folder of a finished run of an agent
        out: checkpoint folder to write, with `starts` and `card.json`
        starts: recorded episodes of random play that worlds start in
        rollouts: rollouts of each policy
        ages: steps of a rollout
        seed: of play and imagination; must differ from the run's, whose play the world has seen

    Raises:
        InputError: the run is unfinished, has no world, or has the same seed
    """
    config = read_config(folder)
    if seed == config.run.seed:
        raise InputError(f"--seed: must differ from the run's ({config.run.seed}), whose play the world has seen")
    env, space = real_environments(config.real.environment, config.real.count)
    agent = load_agent(folder, space, config)
    if agent.world is None:
        raise InputError(f"{folder}: the run has no world model")
    chance = RandomPolicy(space.actions, np.random.default_rng(seed))
    # Half the bytes; the card is of what was written.
    save_checkpoint(load_checkpoint(folder / "model").to(torch.bfloat16), out)
    world = load_checkpoint(out).world(config.sampling)
    _write_starts(out / "starts", played(env, chance, space, seed, "random"), starts)
    card: dict[str, Any] = {
        "environment": space.env,
        "system": config.of_system,
        "interactions": config.real.total,
        "run_seed": config.run.seed,
        "seed": seed,
        "rollouts": rollouts,
        "context": config.imagination.burn_in,
    }
    for offset, (name, policy) in enumerate({"random": chance, "agent": agent.player(env.num_envs, seed)}.items()):
        play = played(env, policy, space, seed + 1 + offset, name)
        card[name] = rows(world, play, rollouts, config.imagination.burn_in, ages, seed)
    gaps = measure_policies(agent, world, env, space, SHARES, -(-rollouts // (5 * env.num_envs)), seed)
    card["policies"] = policies([gap["reward"] for gap in gaps])
    write_json(out / "card.json", card)
    return card


def played(env: VectorEnv[Any, Any, Any], policy: Policy, space: FrameSpace, seed: int, name: str) -> Replay:
    """Play `STEPS` steps of each environment. name: of the policy."""
    replay = Replay(space, env.num_envs * STEPS)
    replay.add_segments(rollout(env, policy, STEPS, EnvState.reset(env, seed)).segments, name, seed)
    return replay


def rows(world: FrameWorld[Any], play: Replay, count: int, context: int, ages: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for each age: figures of real and imagined steps, and the share of exact frames.

    pixels: mean number of pixels of each channel, which count the objects of frames with a channel for each kind.
    """
    compared = open_loop_rollouts(world, play, count, context, ages, np.random.default_rng(seed), torch.device("cpu"))
    real, imagined = compared.real, compared.imagined
    columns: dict[str, Any] = {"n_real": real["valid"].sum(0), "n_imagined": imagined["valid"].sum(0)}
    for name in ("reward", "end"):
        columns |= {f"{name}_real": means(real, name, 0), f"{name}_imagined": means(imagined, name, 0)}
    columns |= {name: means(imagined, name, 0) for name in ("whole", "exact")}
    columns |= {"pixels_real": means(real, "lit", 0), "pixels_imagined": means(imagined, "lit", 0)}
    return [{"age": age + 1} | {name: _plain(column[age]) for name, column in columns.items()} for age in range(ages)]


def policies(gaps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the rewards of the agent with each of `SHARES` random actions, and whether imagination ranks them so."""
    real, imagined = ([gap[side] for gap in gaps] for side in ("real", "imagined"))
    table = [
        {"random_share": share, "gap_ci95": [round(end, 4) for end in gap["ci95"]]}
        | {side: round(gap[side], 4) for side in ("real", "imagined")}
        for share, gap in zip(SHARES, gaps, strict=True)
    ]
    return {"pairs_in_order": pairs_in_order(real, imagined), "rewards": table}


def _plain(value: Any) -> Any:
    """Convert to JSON; no step of an age is None."""
    if isinstance(value, np.ndarray):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, np.integer) else None if np.isnan(value) else round(float(value), 4)


def _write_starts(folder: Path, play: Replay, count: int) -> None:
    """Write the first `count` episodes that begin and end in the play.

    Raises:
        InputError: there are fewer
    """
    whole = [episode for episode in play.episodes() if not episode.open][:count]
    if len(whole) < count:
        raise InputError(f"--starts: must be at most {len(whole)}, the episodes of {STEPS} steps, got {count}")
    folder.mkdir()
    for number, episode in enumerate(whole):
        write_episode(folder / f"{number:03d}.npz", episode)
