"""Runs that several rooms watch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.fixtures.shards import toy_episode, write_toy_shards
from tests.training.consequences.watched import SETTINGS, Watched


@pytest.fixture(scope="session")
def dev_shards(tmp_path_factory) -> Path:
    """Episodes with a goal of their own."""
    out = tmp_path_factory.mktemp("dev")
    episodes = (dataclasses.replace(toy_episode(i), goal="stand still") for i in range(100, 110))
    write_toy_shards(out, episodes)
    return out


@pytest.fixture(scope="session")
def watched(config_file, dev_shards, tmp_path_factory) -> Watched:
    torch.set_num_threads(1)  # as every module of these tests does
    return Watched(config_file, tmp_path_factory.mktemp("runs") / "watched", [*SETTINGS, f"data.dev=[{dev_shards}]"])
