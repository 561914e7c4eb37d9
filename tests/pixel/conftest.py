"""Recorded play of the blocks, and a training configuration for it."""

from __future__ import annotations

import pytest
import yaml

from loopwm.records.frames import write_episode
from tests.pixel.blocks import PATCH, played


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
        "model": {"codes": 8, "dim": 32, "heads": 2, "mlp_dim": 64, "mu_rec": 2.0, "default_depth": 2, "max_loops": 4}
        | {"patch": [PATCH, PATCH]},
        "data": {"train": str(frames / "train"), "dev": str(frames / "test")},
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
