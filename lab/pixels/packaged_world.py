"""Package the world of an agent's run: its checkpoint, places to start in, and a card of what it gets wrong.

The card compares imagined with real rollouts of the same actions from the same places, by age, in random
play and in the agent's, of other seeds than the run's; and it says whether imagination ranks policies as the game does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from safetensors.torch import load_file

from lab.pixels.open_loop import means, open_loop_rollouts
from lab.pixels.playing import load_agent, read_config
from lab.pixels.reality_gap import measure_policies, pairs_in_order
from loopwm.pixel.agents.config import AgentConfig
from loopwm.pixel.checkpoint import WEIGHTS, load_checkpoint, save_checkpoint
from loopwm.pixel.gym import real_environments
from loopwm.pixel.imagined import EnvState, FrameWorld, Policy, RandomPolicy, rollout
from loopwm.pixel.replay import Replay
from loopwm.records.errors import InputError
from loopwm.records.files import read_json, read_json_lines, write_json
from loopwm.records.frames import FrameSpace, write_episode

CARD = "card.json"
STEPS = 400
"""Steps of each real environment that rollouts start in."""
RECORDED = 32
"""Frames of recorded play before a rollout: most include the beginning of an episode."""
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
    config = _checked_config(folder, seed)
    env, space = real_environments(config.real.environment, config.real.count)
    # Half the bytes; the card is of what was written.
    save_checkpoint(load_checkpoint(folder / "model").to(torch.bfloat16), out)
    chance = RandomPolicy(space.actions, np.random.default_rng(seed))
    _write_starts(out / "starts", played(env, chance, space, seed, "random"), starts)
    return write_card(folder, out, rollouts, ages, seed)


def package_recorded(
    model: Path, frames: Path, out: Path, starts: int, rollouts: int, ages: int, sampling: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Write the folder `out` for a world without an agent; return the card, of recorded play that it has not seen.

    model: checkpoint folder. frames: folder of held-out episodes. sampling: keys of that section, with which the
    packaged world is stepped. Others as of `package`. Raises InputError for frames of another environment, or too few.
    """
    system, replay = load_checkpoint(model).to(torch.bfloat16), Replay.from_folder(frames)
    system.space.require(replay.space, str(frames))
    system.sampling = system.sampling_with(sampling)
    save_checkpoint(system, out)
    _write_starts(out / "starts", replay, starts)
    card: dict[str, Any] = {"environment": system.space.env, "system": system.name, "seed": seed, "rollouts": rollouts}
    world = load_checkpoint(out).world()
    card |= {"context": RECORDED, "recorded": rows(world, replay, rollouts, RECORDED, ages, seed)}
    write_json(out / CARD, card)
    return card


def _checked_config(folder: Path, seed: int) -> AgentConfig:
    config = read_config(folder)
    if seed == config.run.seed:
        raise InputError(f"--seed: must differ from the run's ({config.run.seed}), whose play the world has seen")
    if not (folder / "model").is_dir():
        raise InputError(f"{folder}: the run has no world model")
    return config


def write_card(folder: Path, out: Path, rollouts: int, ages: int, seed: int) -> dict[str, Any]:
    """Measure the world in `out` with the agent of a run, write its `card.json`, and return it.

    The agent may be another world's: it reads frames, and carries along its own world. Arguments as of `package`.

    Raises:
        InputError: as `package`, or the run is of another environment
    """
    config = _checked_config(folder, seed)
    env, space = real_environments(config.real.environment, config.real.count)
    agent, system = load_agent(folder, space, config), load_checkpoint(out)
    space.require(system.space, str(out))
    world = system.world(config.sampling)
    chance, context = RandomPolicy(space.actions, np.random.default_rng(seed)), config.imagination.burn_in
    trained, written = load_file(folder / "model" / WEIGHTS), load_file(out / WEIGHTS)
    own = trained.keys() == written.keys() and all(torch.equal(written[k], trained[k].to(written[k])) for k in written)
    steps = [record["interactions"] for _, record in read_json_lines(folder / "metrics.jsonl")]
    card: dict[str, Any] = {"environment": space.env, "system": system.name}
    if own:
        card |= {"interactions": steps[-1], "run_seed": config.run.seed}
    else:  # what was said of the world's own run stays
        card |= {name: read_json(out / CARD)[name] for name in ("interactions", "run_seed")}
    card |= {"seed": seed, "rollouts": rollouts, "context": context, "own_agent": own}
    for offset, (name, policy) in enumerate({"random": chance, "agent": agent.player(env.num_envs, seed)}.items()):
        play = played(env, policy, space, seed + 1 + offset, name)
        card[name] = rows(world, play, rollouts, context, ages, seed)
    gaps = measure_policies(agent, world, env, space, SHARES, -(-rollouts // (5 * env.num_envs)), seed)
    card["policies"] = policies([gap["reward"] for gap in gaps])
    write_json(out / CARD, card)
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
    columns |= {name: means(imagined, name, 0) for name in ("whole", "exact", "cells")}
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
        raise InputError(f"--starts: must be at most {len(whole)}, the whole episodes of the play, got {count}")
    folder.mkdir()
    for number, episode in enumerate(whole):
        write_episode(folder / f"{number:03d}.npz", episode)
