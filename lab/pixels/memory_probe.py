"""Memory probe: locate the loss of a cue in memory, decoding or imagination.

Real frames replace the imagined ones of `memory_recall`, up to the last turn. A linear classifier of the memory before
the last frame predicts the cue's kind, fitted to half of the mazes and tested on the others; the decoded frame is
scored too.

Shape suffixes: M mazes, T steps, D memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lab.pixels.mazes import BACK, LEFT, SEEN, STAY, Frames, Mazes, scored
from loopwm.pixel.imagined import FrameWorld

ROWS = 50
"""Mazes per batch."""
RIDGE = 1e-2
"""Ridge penalty of the classifier, relative to the inputs' mean square."""


@runtime_checkable
class Remembers(Protocol):
    """System with an accessible memory: h (B, T, D) of frames uint8 (B, T, H, W, C), and loops (B, T)."""

    looped: Any

    def remember(self, obs: Tensor, action: Tensor, first: Tensor, depth: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Probe:
    """Share of mazes with the right cue: by the classifier of the memory, and in the decoded frame."""

    held: float
    drawn: float


def shown(real: Mazes, wait: int) -> tuple[Tensor, Tensor]:
    """Return real frames uint8 (M, T + 1, H, W, C) up to the last turn, and actions (M, T)."""
    back = [real.context[:, turned] for turned in range(1, BACK)]
    frames = [*real.context.swapaxes(0, 1), *[real.context[:, SEEN]] * wait, *back]
    actions = [LEFT] * SEEN + [STAY] * wait + [LEFT] * len(back)
    return torch.from_numpy(np.stack(frames, 1)), torch.tensor(actions).expand(len(real.kind), -1)


@torch.inference_mode()
def probed(system: Remembers, world: FrameWorld[Any], real: Mazes, wait: int, seed: int) -> Probe:
    obs, action = shown(real, wait)
    first = torch.zeros(obs.shape[:2], dtype=torch.bool)
    first[:, 0] = True
    generator = torch.Generator().manual_seed(seed)
    memories, frames = [], []
    for start in range(0, len(obs), ROWS):
        rows = slice(start, start + ROWS)
        turn = torch.full((len(obs[rows]),), LEFT)
        acted = torch.cat((action[rows], turn[:, None]), 1)
        memories.append(system.remember(obs[rows], acted, first[rows], system.looped.default_depth)[0][:, -1])
        state = world.start(obs[rows], action[rows], first[rows], generator)
        frames.append(world.show(world.step(state, turn, generator).state).numpy())
    decoded: Frames = np.concatenate(frames)
    return Probe(separable(torch.cat(memories), real.kind), scored(decoded, real).right)


def separable(h: Tensor, kind: NDArray[np.int64]) -> float:
    """Return the accuracy on the second half of h (M, D) of a ridge regression on the first half; kind: 0 or 1."""
    targets, half = torch.from_numpy(kind * 2.0 - 1), len(h) // 2
    x = h.double() - h[:half].double().mean(0)
    x = torch.cat((x / x[:half].square().mean().sqrt().clamp(min=1e-12), torch.ones(len(x), 1)), 1)
    fitted, answers = x[:half], targets[:half]
    square = fitted.mT @ fitted + RIDGE * half * torch.eye(x.shape[1])
    weights = torch.linalg.solve(square, fitted.mT @ answers)
    return float(((x[half:] @ weights > 0) == (targets[half:] > 0)).double().mean())
