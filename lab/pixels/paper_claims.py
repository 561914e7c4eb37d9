"""What a STORM checkpoint knows of held-out play: its latents, its open-loop frames, and whether it heeds actions.

Sequences are cut from episodes at random places: some frames are seen, those after them imagined by the true actions.
Errors are squared differences of pixels in 0 to 1. What moves in a sequence is a pixel that is not the same in all its
frames, so that the rule which tells of it favours nobody.

Shape suffixes: B sequences, T frames, G groups, K classes, H/W/C frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loopwm.pixel.storm.model import kl_divergence, sample_latents
from loopwm.pixel.storm.system import StormSystem, evaluating
from loopwm.records.errors import InputError
from loopwm.records.frames import episode_files, read_episode


@dataclass(frozen=True, eq=False)
class Play:
    """obs: uint8 (B, T, H, W, C); action: int64 (B, T - 1), taken at all but the last; first: bool (B, T), whether a
    frame begins its episode."""

    obs: Tensor
    action: Tensor
    first: Tensor


def held_out_play(folder: Path, system: StormSystem, count: int, frames: int, seed: int) -> Play:
    """`count` different sequences of `frames`. Raises InputError for a folder of other frames, or of too few."""
    episodes = [read_episode(path) for path in episode_files(folder)]
    for episode in episodes:
        system.space.require(episode.space, str(folder))
    places = [(i, start) for i, episode in enumerate(episodes) for start in range(len(episode.obs) - frames + 1)]
    if len(places) < count:
        raise InputError(f"{folder}: holds {len(places)} sequences of {frames} frames, {count} are asked for")
    chosen = [places[i] for i in np.random.default_rng(seed).permutation(len(places))[:count]]
    obs = np.stack([episodes[i].obs[start : start + frames] for i, start in chosen])
    action = np.stack([episodes[i].action[start : start + frames - 1] for i, start in chosen])
    first = torch.zeros(count, frames, dtype=torch.bool)
    first[:, 0] = torch.tensor([start == 0 for _, start in chosen])
    return Play(torch.from_numpy(obs), torch.from_numpy(action).long(), first)


@dataclass(frozen=True)
class Found:
    """What was measured of one checkpoint.

    reconstruction, mean_frame, shuffled: error of a frame, summed over its pixels: decoded from its own latents, taken
    to be the mean of all frames, and decoded from another sequence's latents. kl, kl_uniform, kl_mean: nats of a step
    between posterior and prior, uniform chance, or the mean posterior, which knows the game but not the sequence.
    used_groups: groups whose latents tell at least one bit of the frame. open_loop, copy_last: by horizon, mean error
    of a pixel that moves. own, permuted: error of a frame in the agent's columns by the true actions, and by another
    sequence's.
    """

    reconstruction: float
    mean_frame: float
    shuffled: float
    kl: float
    kl_uniform: float
    kl_mean: float
    used_groups: int
    open_loop: tuple[float, ...]
    copy_last: tuple[float, ...]
    own: float
    permuted: float


@torch.no_grad()
def measure(system: StormSystem, play: Play, context: int, columns: Sequence[int], seed: int) -> Found:
    """columns: of the frame, where what the agent moves is."""
    generator = torch.Generator().manual_seed(seed)
    truth = play.obs.float() / 255
    order = torch.randperm(len(truth), generator=generator)
    dealt = torch.empty_like(order)
    dealt[order] = order.roll(1)  # nobody's own
    with evaluating(system):
        latents = _latents(system, play, truth, dealt, generator)
        imagined = _imagined(system, play, context, play.action, seed)
        other = _imagined(system, play, context, play.action[dealt], seed)
    later, last = truth[:, context:], truth[:, context - 1 : context]
    moves = (truth != truth[:, :1]).any(-1).any(1)
    errors = {"open_loop": imagined - later, "copy_last": last.expand_as(later) - later}
    by_horizon: dict[str, Any] = {
        name: tuple(float(of_step[moves].mean()) for of_step in error.square().unbind(1))
        for name, error in errors.items()
    }
    mine = [(frames - later).square()[..., columns, :].sum((2, 3, 4)).mean() for frames in (imagined, other)]
    return Found(**latents, **by_horizon, own=float(mine[0]), permuted=float(mine[1]))


def _latents(
    system: StormSystem, play: Play, truth: Tensor, dealt: Tensor, generator: torch.Generator
) -> dict[str, Any]:
    """What the posterior tells of frames, and what the prior knows of it, teacher-forced."""
    network = system.network
    posterior = torch.cat([network.encode(obs) for obs in play.obs.split(32)])
    z = sample_latents(posterior, generator)
    places = torch.arange(play.action.shape[1]).expand_as(play.action)
    e = network.mix(z[:, :-1], play.action)
    depth = network.dynamics.check(system.config.default_depth)
    prior = network.prior(network.run(e, places, play.first[:, :-1], depth).h, z[:, 1:])
    seen, uniform = posterior[:, 1:], torch.full_like(prior, -math.log(system.config.classes))
    p = posterior.exp()
    known = p.mean((0, 1)).log().expand_as(prior)
    bits = (entropy(p.mean((0, 1))) - entropy(p).mean((0, 1))) / math.log(2)
    spread = (truth - truth.mean((0, 1))).square().sum((2, 3, 4)).mean()
    return {
        "reconstruction": _error(system, z, play.obs),
        "mean_frame": float(spread),
        "shuffled": _error(system, z[dealt], play.obs),
        "kl": float(kl_divergence(seen, prior).mean()),
        "kl_uniform": float(kl_divergence(seen, uniform).mean()),
        "kl_mean": float(kl_divergence(seen, known).mean()),
        "used_groups": int((bits >= 1).sum()),
    }


def entropy(p: Tensor) -> Tensor:
    """In nats: (..., K) -> (...)."""
    return -torch.special.xlogy(p, p).sum(-1)


def _error(system: StormSystem, z: Tensor, obs: Tensor) -> float:
    pairs, images = zip(z.split(32), obs.split(32), strict=True), system.network.images
    frames = torch.cat([images.frames(system.network.decode(some)).reshape(of.shape) for some, of in pairs])
    return float(((frames.float() - obs.float()) / 255).square().sum((2, 3, 4)).mean())


def _imagined(system: StormSystem, play: Play, context: int, action: Tensor, seed: int) -> Tensor:
    """Frames (B, T - context, H, W, C) in 0 to 1, after `context` true ones with their true actions."""
    world, generator = system.world(), torch.Generator().manual_seed(seed)
    seen = play.obs[:, :context], play.action[:, : context - 1], play.first[:, :context]
    state, frames = world.start(*seen, generator), []
    for step in range(context - 1, action.shape[1]):
        state = world.step(state, action[:, step], generator).state
        frames.append(world.show(state).float() / 255)
    return torch.stack(frames, 1)
