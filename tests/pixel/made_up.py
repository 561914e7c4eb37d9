"""Made-up frame episodes, every step of which can be told from any other."""

from __future__ import annotations

import numpy as np

from loopwm.records.frames import FrameEpisode, FrameSpace

SPACE = FrameSpace("made/up", "1", (2, 3, 1), 200)


def make_episode(start: int = 0, steps: int = 4, ends: bool = True, space: FrameSpace = SPACE) -> FrameEpisode:
    """Step i shows frames of start + i, plays action start + i and is rewarded so; it terminates if it `ends`."""
    numbers = np.arange(start, start + steps + 1)
    last = np.arange(steps) == steps - 1
    return FrameEpisode(
        space=space,
        obs=np.broadcast_to(numbers.astype(np.uint8)[:, None, None, None], (steps + 1, *space.frame_shape)).copy(),
        action=numbers[:-1].astype(np.int64),
        reward=numbers[:-1].astype(np.float32),
        terminated=last & ends,
        truncated=np.zeros(steps, dtype=bool),
        seed=start,
        policy="random",
        extras={"lives": numbers.astype(np.int16)},
    )
