"""MiniGrid's Memory mazes after EDELINE's figure 1: what is seen of them, and how an answer is scored.

Mazes count whose cue is out of sight while the agent waits and in sight once it has turned back. Of each answer, a last
frame: which of the two kinds of cue its tile is nearer to, the real frame's or the other's; whether it is nearer to one
of the two than to their mean; and the error of the whole frame.

Shape suffixes: M mazes, H/W/C frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval.scores.intervals import interval95
from loopwm.records.errors import InputError
from loopwm.training.real_world import real_environment

LEFT, RIGHT, FORWARD, STAY = 0, 1, 2, 6
"""Actions of MiniGrid."""
SEEN, BACK = 4, 2
Frames = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Mazes:
    """What is seen (M, SEEN + 1, H, W, C), the frame after waiting and turning back (M, H, W, C), the place of the
    cue's tile in it (M, 2), its kind (M,), and how many mazes were looked at."""

    seen: Frames
    last: Frames
    cue: NDArray[np.int64]
    kind: NDArray[np.int64]
    tried: int


def mazes(name: str, count: int, first_seed: int) -> Mazes:
    """The first `count` that are valid. Raises InputError for an environment without a cue."""
    env = real_environment(name)
    found: list[tuple[Frames, Frames, NDArray[np.int64], int]] = []
    seed = first_seed
    while len(found) < count:
        frame, told = env.reset(seed=seed)
        if "cue" not in told:
            raise InputError(f"environment: {name} has no cue to remember")
        seed += 1
        frames = [frame]
        for _ in range(SEEN):
            frame, *_, told = env.step(np.int64(LEFT))
            frames.append(frame)
        hidden = told["cue"][0] < 0
        for _ in range(BACK):
            frame, *_, told = env.step(np.int64(LEFT))
        if hidden and told["cue"][0] >= 0:
            found.append((np.stack(frames), frame, np.asarray(told["cue"]), int(told["cue_kind"])))
    env.close()
    seen, last, cue, kind = zip(*found, strict=True)
    return Mazes(np.stack(seen), np.stack(last), np.stack(cue), np.array(kind), seed - first_seed)


@dataclass(frozen=True)
class Recall:
    """right: share of frames whose cue is the real one, with 95 % bounds over mazes; definite: share whose tile is
    nearer to one of the two cues than to their mean; error: mean square over pixels in [0, 1]."""

    mazes: int
    right: float
    low: float
    high: float
    definite: float
    error: float


def scored(found: Frames, real: Mazes) -> Recall:
    """Raises ValueError where only one kind of cue was seen."""
    if len(set(real.kind.tolist())) < 2:
        raise ValueError("only one kind of cue was seen")
    tile = found.shape[1] // 8
    tiles = [tiles_of(frames, real.cue, tile) for frames in (found, real.last)]
    ours, theirs = tiles
    kinds = [theirs[real.kind == kind].mean(0) for kind in (0, 1)]
    own, other = (np.stack([kinds[k] for k in choice]) for choice in (real.kind, 1 - real.kind))
    distance = [np.square(ours - of).mean((1, 2, 3)) for of in (own, other, (own + other) / 2)]
    right = (distance[0] < distance[1]).astype(float)
    low, high = interval95(right[:, None])[:, 0].tolist()
    definite = np.minimum(distance[0], distance[1]) < distance[2]
    error = np.square(found / 255 - real.last / 255).mean()
    return Recall(len(right), float(right.mean()), low, high, float(definite.mean()), float(error))


def tiles_of(frames: Frames, cue: NDArray[np.int64], tile: int) -> NDArray[np.float64]:
    """The cue's tile of each frame, in [0, 1]."""
    return np.stack(
        [frame[r * tile : (r + 1) * tile, c * tile : (c + 1) * tile] for frame, (r, c) in zip(frames, cue, strict=True)]
    ) / 255  # fmt: skip
