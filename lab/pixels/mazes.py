"""MiniGrid's Memory mazes after EDELINE's figure 1: context frames and scores of imagined frames.

Valid mazes have a cue that is out of sight while the agent waits and visible once it has turned back. Scores of a last
frame: the cue nearest to its tile, the real or the other; True if it is nearer to one of the two than to their mean;
and the error of the whole frame.

Shape suffixes: M mazes, H/W/C frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.estimates import interval95
from loopwm.pixel.gym import real_environment
from loopwm.records.errors import InputError

LEFT, RIGHT, FORWARD, STAY = 0, 1, 2, 6
"""Actions of MiniGrid."""
SEEN, BACK = 4, 2
Frames = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Mazes:
    """Mazes.

    context: frames before waiting, (M, SEEN + 1, H, W, C)
    last: frames after waiting and turning back, (M, H, W, C)
    cue: row and column of the cue's tile in `last`, (M, 2)
    kind: kind of the cue, (M,)
    tried: number of mazes tried
    """

    context: Frames
    last: Frames
    cue: NDArray[np.int64]
    kind: NDArray[np.int64]
    tried: int


def mazes(name: str, count: int, first_seed: int) -> Mazes:
    """Find the first `count` valid mazes.

    Raises:
        InputError: the environment has no cue
    """
    env = real_environment(name)
    valid: list[tuple[Frames, Frames, NDArray[np.int64], int]] = []
    seed = first_seed
    while len(valid) < count:
        frame, info = env.reset(seed=seed)
        if "cue" not in info:
            raise InputError(f"environment: {name} has no cue to remember")
        seed += 1
        frames = [frame]
        for _ in range(SEEN):
            frame, *_, info = env.step(np.int64(LEFT))
            frames.append(frame)
        hidden = info["cue"][0] < 0
        for _ in range(BACK):
            frame, *_, info = env.step(np.int64(LEFT))
        if hidden and info["cue"][0] >= 0:
            valid.append((np.stack(frames), frame, np.asarray(info["cue"]), int(info["cue_kind"])))
    env.close()
    context, last, cue, kind = zip(*valid, strict=True)
    return Mazes(np.stack(context), np.stack(last), np.stack(cue), np.array(kind), seed - first_seed)


@dataclass(frozen=True)
class CueScores:
    """Scores of imagined mazes.

    right: share of frames with the real cue, with 95 % bounds over mazes
    definite: share whose tile is nearer to one of the two cues than to their mean
    error: mean square over pixels in [0, 1]
    """

    mazes: int
    right: float
    low: float
    high: float
    definite: float
    error: float


def scored(imagined: Frames, real: Mazes) -> CueScores:
    """Score last frames against the real ones.

    Raises:
        ValueError: all cues are of one kind
    """
    if len(set(real.kind.tolist())) < 2:
        raise ValueError("only one kind of cue was seen")
    tile = imagined.shape[1] // 8
    tiles = [tiles_of(frames, real.cue, tile) for frames in (imagined, real.last)]
    ours, theirs = tiles
    kinds = [theirs[real.kind == kind].mean(0) for kind in (0, 1)]
    own, other = (np.stack([kinds[k] for k in choice]) for choice in (real.kind, 1 - real.kind))
    distance = [np.square(ours - of).mean((1, 2, 3)) for of in (own, other, (own + other) / 2)]
    right = (distance[0] < distance[1]).astype(float)
    low, high = interval95(right[:, None])[:, 0].tolist()
    definite = np.minimum(distance[0], distance[1]) < distance[2]
    error = np.square(imagined / 255 - real.last / 255).mean()
    return CueScores(len(right), float(right.mean()), low, high, float(definite.mean()), float(error))


def tiles_of(frames: Frames, cue: NDArray[np.int64], tile: int) -> NDArray[np.float64]:
    """Cut out the cue's tile of each frame, in [0, 1]."""
    return np.stack(
        [frame[r * tile : (r + 1) * tile, c * tile : (c + 1) * tile] for frame, (r, c) in zip(frames, cue, strict=True)]
    ) / 255  # fmt: skip
