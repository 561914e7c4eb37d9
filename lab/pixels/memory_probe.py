"""Where a cue is lost: in the memory, in drawing, or in imagination?

The frames that `recall` imagines are shown instead, real ones up to the last turn. Asked are, of the cue's kind, a
linear classifier of the memory that the last frame is drawn from, fitted to half of the mazes and asked of the others;
and the frame that is drawn from it after real ones.

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
"""Mazes shown at once."""
RIDGE = 1e-2
"""Of the classifier, a part of the mean square of what it sees."""


@runtime_checkable
class Remembers(Protocol):
    """A system whose memory can be looked at: h (B, T, D) of frames uint8 (B, T, H, W, C), and loops (B, T)."""

    config: Any

    def remember(self, obs: Tensor, action: Tensor, first: Tensor, depth: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Probe:
    """Shares of mazes whose cue is right: told from the memory, and drawn after real frames."""

    held: float
    drawn: float


def shown(real: Mazes, wait: int) -> tuple[Tensor, Tensor]:
    """Real frames uint8 (M, T + 1, H, W, C) up to the one that the last turn leaves, and actions (M, T)."""
    back = [real.seen[:, turned] for turned in range(1, BACK)]
    frames = [*real.seen.swapaxes(0, 1), *[real.seen[:, SEEN]] * wait, *back]
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
        memories.append(system.remember(obs[rows], acted, first[rows], system.config.default_depth)[0][:, -1])
        state = world.start(obs[rows], action[rows], first[rows], generator)
        frames.append(world.show(world.step(state, turn, generator).state).numpy())
    drawn: Frames = np.concatenate(frames)
    return Probe(separable(torch.cat(memories), real.kind), scored(drawn, real).right)


def separable(h: Tensor, kind: NDArray[np.int64]) -> float:
    """Share of the second half of h (M, D) whose kind, 0 or 1, a ridge regression on the first half tells."""
    wanted, half = torch.from_numpy(kind * 2.0 - 1), len(h) // 2
    x = h.double() - h[:half].double().mean(0)
    x = torch.cat((x / x[:half].square().mean().sqrt().clamp(min=1e-12), torch.ones(len(x), 1)), 1)
    fitted, answers = x[:half], wanted[:half]
    square = fitted.mT @ fitted + RIDGE * half * torch.eye(x.shape[1])
    weights = torch.linalg.solve(square, fitted.mT @ answers)
    return float(((x[half:] @ weights > 0) == (wanted[half:] > 0)).double().mean())
