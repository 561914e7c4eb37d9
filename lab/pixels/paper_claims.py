"""Measure a STORM checkpoint on held-out play: latents, open-loop frames, and sensitivity to actions.

Sequences are cut from episodes at random places: context frames, then frames imagined by the true actions. Errors are
squared differences of pixels in 0 to 1. Moving pixels are those that change within a sequence, a rule that favours no
model.

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
    """Held-out sequences.

    obs: uint8 (B, T, H, W, C)
    action: int64 (B, T - 1), of all frames but the last
    first: bool (B, T), True where a frame begins its episode
    """

    obs: Tensor
    action: Tensor
    first: Tensor


def held_out_play(folder: Path, system: StormSystem, count: int, frames: int, seed: int) -> Play:
    """Sample `count` different sequences of `frames`.

    Raises:
        InputError: the folder has other frames, or too few
    """
    episodes = [read_episode(path) for path in episode_files(folder)]
    for episode in episodes:
        system.space.require(episode.space, str(folder))
    places = [(i, start) for i, episode in enumerate(episodes) for start in range(len(episode.obs) - frames + 1)]
    if len(places) < count:
        raise InputError(f"{folder}: must have {count} sequences of {frames} frames, got {len(places)}")
    chosen = [places[i] for i in np.random.default_rng(seed).permutation(len(places))[:count]]
    obs = np.stack([episodes[i].obs[start : start + frames] for i, start in chosen])
    action = np.stack([episodes[i].action[start : start + frames - 1] for i, start in chosen])
    first = torch.zeros(count, frames, dtype=torch.bool)
    first[:, 0] = torch.tensor([start == 0 for _, start in chosen])
    return Play(torch.from_numpy(obs), torch.from_numpy(action).long(), first)


@dataclass(frozen=True)
class ClaimFigures:
    """Figures of one checkpoint.

    reconstruction, mean_frame, shuffled: error of a frame summed over pixels: decoded from its own latents, of the mean
    frame, and decoded from another sequence's latents
    kl, kl_uniform, kl_mean: nats per step between posterior and prior, uniform distribution, or mean posterior, which
    contains the game but not the sequence
    used_groups: groups whose latents contain at least one bit about the frame
    open_loop, copy_last: mean error of a moving pixel by horizon
    own, permuted: error of a frame in the agent's columns by the true actions, and by another sequence's
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
def measure(system: StormSystem, play: Play, context: int, columns: Sequence[int], seed: int) -> ClaimFigures:
    """Measure a checkpoint. columns: of the frame, where the agent's object moves."""
    generator = torch.Generator().manual_seed(seed)
    truth = play.obs.float() / 255
    order = torch.randperm(len(truth), generator=generator)
    other_rows = torch.empty_like(order)
    other_rows[order] = order.roll(1)  # a cyclic shift: every sequence gets another's
    with evaluating(system):
        latents = _latents(system, play, truth, other_rows, generator)
        imagined = _imagined(system, play, context, play.action, seed)
        other = _imagined(system, play, context, play.action[other_rows], seed)
    later, last = truth[:, context:], truth[:, context - 1 : context]
    moves = (truth != truth[:, :1]).any(-1).any(1)
    errors = {"open_loop": imagined - later, "copy_last": last.expand_as(later) - later}
    by_horizon: dict[str, Any] = {
        name: tuple(float(of_step[moves].mean()) for of_step in error.square().unbind(1))
        for name, error in errors.items()
    }
    mine = [(frames - later).square()[..., columns, :].sum((2, 3, 4)).mean() for frames in (imagined, other)]
    return ClaimFigures(**latents, **by_horizon, own=float(mine[0]), permuted=float(mine[1]))


def _latents(
    system: StormSystem, play: Play, truth: Tensor, other_rows: Tensor, generator: torch.Generator
) -> dict[str, Any]:
    """Measure posterior and teacher-forced prior."""
    network = system.network
    posterior = torch.cat([network.encode(obs) for obs in play.obs.split(32)])
    z = sample_latents(posterior, generator)
    places = torch.arange(play.action.shape[1]).expand_as(play.action)
    e = network.mix(z[:, :-1], play.action)
    depth = system.looped.default_depth
    prior = network.prior(network.run(e, places, play.first[:, :-1], depth).h, z[:, 1:])
    targets, uniform = posterior[:, 1:], torch.full_like(prior, -math.log(system.config.classes))
    p = posterior.exp()
    marginal = p.mean((0, 1)).log().expand_as(prior)
    bits = (entropy(p.mean((0, 1))) - entropy(p).mean((0, 1))) / math.log(2)
    spread = (truth - truth.mean((0, 1))).square().sum((2, 3, 4)).mean()
    return {
        "reconstruction": _error(system, z, play.obs),
        "mean_frame": float(spread),
        "shuffled": _error(system, z[other_rows], play.obs),
        "kl": float(kl_divergence(targets, prior).mean()),
        "kl_uniform": float(kl_divergence(targets, uniform).mean()),
        "kl_mean": float(kl_divergence(targets, marginal).mean()),
        "used_groups": int((bits >= 1).sum()),
    }


def entropy(p: Tensor) -> Tensor:
    """Compute the entropy in nats: (..., K) -> (...)."""
    return -torch.special.xlogy(p, p).sum(-1)


def _error(system: StormSystem, z: Tensor, obs: Tensor) -> float:
    pairs, images = zip(z.split(32), obs.split(32), strict=True), system.network.images
    frames = torch.cat([images.frames(system.network.decode(some)).reshape(of.shape) for some, of in pairs])
    return float(((frames.float() - obs.float()) / 255).square().sum((2, 3, 4)).mean())


def _imagined(system: StormSystem, play: Play, context: int, action: Tensor, seed: int) -> Tensor:
    """Imagine frames (B, T - context, H, W, C) in 0 to 1 after `context` real ones with their actions."""
    world, generator = system.world(), torch.Generator().manual_seed(seed)
    context_play = play.obs[:, :context], play.action[:, : context - 1], play.first[:, :context]
    state, frames = world.start(*context_play, generator), []
    for step in range(context - 1, action.shape[1]):
        state = world.step(state, action[:, step], generator).state
        frames.append(world.show(state).float() / 255)
    return torch.stack(frames, 1)
