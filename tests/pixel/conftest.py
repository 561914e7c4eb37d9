"""A tiny world of frames: a block on a grid goes where it is told, and sometimes a second one wanders."""

from __future__ import annotations

import numpy as np
import pytest
import yaml

from loopwm.pixel.frames import FrameEpisode, FrameSpace, write_episode

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


@pytest.fixture(scope="session")
def frames(tmp_path_factory):
    """Folders `train` and `test` of recorded play."""
    root = tmp_path_factory.mktemp("frames")
    for split, seeds in (("train", range(40)), ("test", range(100, 110))):
        (root / split).mkdir()
        for seed in seeds:
            write_episode(root / split / f"episode-{seed:03d}.npz", played(seed))
    return root


@pytest.fixture(scope="session")
def twisted_config(frames, tmp_path_factory):
    """A training configuration that learns the blocks in a few seconds."""
    config = {
        "system": "twisted",
        "model": {"codes": 8, "dim": 32, "heads": 2, "mlp_dim": 64, "mu_rec": 2.0, "default_depth": 2, "max_loops": 4},
        "data": {"train": str(frames / "train"), "dev": str(frames / "test"), "patch": [PATCH, PATCH]},
        "batch": {"rows": 4, "steps": 6, "micro_batches": 2},
        "optimizer": {"name": "adamw", "learning_rate": 5e-3, "weight_decay": 0.0, "warmup_steps": 5},
        "run": {
            "steps": 60,
            "mixed_precision": "no",
            "log_every": 1,
            "eval_every": 60,
            "eval_batches": 2,
            "save_every": 20,
        },
    }
    path = tmp_path_factory.mktemp("config") / "twisted.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
