"""A tiny world of frames: a block on a grid goes where it is told, and sometimes a second one wanders."""

from __future__ import annotations

import numpy as np

from loopwm.records.frames import FrameEpisode, FrameSpace

ROWS, COLUMNS, PATCH = 3, 4, 2
SPACE = FrameSpace("blocks", "1", (ROWS * PATCH, COLUMNS * PATCH, 3), 4)
MOVES = ((0, 1), (0, -1), (1, 0), (-1, 0))


def drawn(place, other):
    frame = np.zeros(SPACE.frame_shape, np.uint8)
    for (y, x), colour in ((place, 200), (other, 90)):
        frame[y * PATCH : (y + 1) * PATCH, x * PATCH : (x + 1) * PATCH] = colour
    return frame


def played(seed, steps=12):
    """The block moves by its action and wraps around; reward 1 in the corner, where the episode ends."""
    rng = np.random.default_rng(seed)
    place, other = np.array((1, 1)), np.array((2, 3))
    obs, action, reward = [drawn(place, other)], [], []
    for _ in range(steps):
        chosen = int(rng.integers(4))
        place = (place + MOVES[chosen]) % (ROWS, COLUMNS)
        obs.append(drawn(place, other))
        action.append(chosen)
        reward.append(float(tuple(place) == (0, 0)))
        if reward[-1]:
            break
    over = np.arange(len(action)) == len(action) - 1
    ended = np.array(reward, np.float32)
    return FrameEpisode(
        SPACE,
        np.stack(obs),
        np.array(action, np.int64),
        ended,
        terminated=over & (ended > 0),
        truncated=over & (ended == 0),
        seed=seed,
        policy="random",
        extras={"creature": rng.random(len(obs)) < 0.5},
    )
