"""Whether a world may be learned in: imagined rollouts beside the play that they were begun in, by their age.

From places of held-out play, the actions that were really taken are imagined in open loop. What is compared stops at a
row's own first end, real or imagined.

Shape suffixes: B rollouts, T ages, H/W/C frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopwm.pixel.imagined import FrameWorld
from loopwm.pixel.replay import Replay, as_learned


@dataclass(frozen=True)
class ValidationGateConfig:
    """What a world must reach before the first imagined update; 0 asks nothing. Raises ValueError out of range."""

    ends: float = 0.0
    """Largest error of the share of steps that end an episode, relative to the real share."""
    objects: float = 0.0
    """Least share of imagined frames that are whole."""
    rollouts: int = 128
    steps: int = 8
    every: int = 10
    """Iterations between looks."""

    def __post_init__(self) -> None:
        if self.ends < 0:
            raise ValueError(f"ends: {self.ends} is below zero")
        if not 0 <= self.objects <= 1:
            raise ValueError(f"objects: {self.objects} is outside 0 to 1")
        for name in ("rollouts", "steps", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")

    def passed(self, ends: float, objects: float) -> bool:
        return (not self.ends or ends <= self.ends) and objects >= self.objects

    @property
    def enabled(self) -> bool:
        return self.ends > 0 or self.objects > 0


@dataclass(frozen=True)
class OpenLoopRollouts:
    """Real and imagined, each (B, T): reward, end, whole, and valid, False behind a row's first end. Truncation, which
    no world imagines, is no end, but nothing lives behind it."""

    real: dict[str, NDArray[Any]]
    imagined: dict[str, NDArray[Any]]

    def by_age(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Means (T,) over the rows that live, real and imagined; frames of ends do not count as whole or not."""
        return _means(self.real, name, 0), _means(self.imagined, name, 0)

    def overall(self) -> dict[str, float]:
        """`ends`: relative error of their share; `objects`: share of imagined frames that are whole; rewards of a step.

        Where nothing really ended, one end in all steps stands for the real share.
        """
        real, imagined = _means(self.real, "end"), _means(self.imagined, "end")
        least = 1 / self.real["valid"].sum()
        return {
            "ends": float(abs(imagined - real) / max(real, least)),
            "objects": float(_means(self.imagined, "whole")),
            "reward_real": float(_means(self.real, "reward")),
            "reward_imagined": float(_means(self.imagined, "reward")),
        }


def _means(part: dict[str, NDArray[Any]], name: str, axis: int | None = None) -> Any:
    counted = part["valid"] & ~part["end"] if name == "whole" else part["valid"]
    with np.errstate(invalid="ignore"):
        return (part[name] * counted).sum(axis) / counted.sum(axis)


def lit_pixels(frames: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Pixels above zero in each channel: (..., H, W, C) -> (..., C)."""
    return np.count_nonzero(frames, axis=(-3, -2))


def whole(frames: NDArray[np.uint8], real: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Whether frames (B, T, H, W, C) show, in every channel, no fewer and no more pixels than real frames (N, H, W, C)
    ever do: where the real ones have one ball, two balls or none are not whole."""
    seen, counts = lit_pixels(real), lit_pixels(frames)
    return ((seen.min(0) <= counts) & (counts <= seen.max(0))).all(-1)


def open_loop_rollouts(
    world: FrameWorld[Any],
    held_out: Replay,
    count: int,
    context: int,
    steps: int,
    rng: np.random.Generator,
    device: torch.device,
) -> OpenLoopRollouts:
    """`count` rollouts of `steps` actions from places after `context` frames. Raises InputError if no play is that
    long."""
    seen = as_learned(held_out.sample(count, context + steps, rng))
    generator = torch.Generator(device).manual_seed(int(rng.integers(2**62)))
    obs, action, first = (torch.from_numpy(x).to(device) for x in (seen.obs, seen.action, seen.first))
    state = world.start(obs[:, :context], action[:, : context - 1], first[:, :context], generator)
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    for t in range(context - 1, context - 1 + steps):
        found = world.step(state, action[:, t], generator)
        state = found.state
        columns.append((found.reward, found.terminated, world.show(state)))
    reward, end, frames = (np.asarray(torch.stack(column, 1).cpu()) for column in zip(*columns, strict=True))
    ages = slice(context - 1, context - 1 + steps)
    # The frames that episodes end with are not what a world is trained on.
    inside = seen.obs.reshape(-1, *seen.obs.shape[2:])
    terminated, over = seen.terminated[:, ages], seen.terminated[:, ages] | seen.truncated[:, ages]
    real = {"reward": seen.reward[:, ages], "end": terminated, "whole": np.ones_like(over), "valid": _valid(over)}
    imagined = {"reward": reward, "end": end, "whole": whole(frames, inside), "valid": _valid(end)}
    return OpenLoopRollouts(real, imagined)


def _valid(over: NDArray[Any]) -> NDArray[np.bool_]:
    return (np.cumsum(over, 1) - over) == 0
