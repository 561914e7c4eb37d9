"""Split checks and hashes of the episodes that studies read."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from loopwm.records.episodes import TRAIN_SPLITS, Episode, format_episode
from loopwm.records.errors import InputError
from loopwm.records.files import sha256
from loopwm.records.training_episodes import TrainingEpisodes, episode_hash


def train_only(episodes: Iterable[Episode], option: str) -> list[Episode]:
    """Return the episodes. Raises InputError naming the option for one outside the train splits."""
    episodes = list(episodes)
    for episode in episodes:
        if episode.split not in TRAIN_SPLITS:
            raise InputError(f"{option}: split: {episode.split!r} in {episode.task}, must be train")
    return episodes


def episodes_hash(episodes: Iterable[Episode]) -> str:
    """Return the SHA-256 of episodes in order, whatever their files are called."""
    return sha256("\n".join(map(format_episode, episodes)))


def training_record(episodes: Iterable[Episode]) -> TrainingEpisodes:
    """Return the record of a checkpoint that learned from these episodes, as `TrainingEpisodes.of_shards` makes it."""
    hashes: dict[str, set[int]] = {}
    for episode in episodes:
        game = sha256(f"{episode.env}/{episode.task}/{episode.variation}")[:16]
        hashes.setdefault(f"episodes/{episode.env}", set()).add(int(episode_hash(episode), 16))
        hashes.setdefault(f"games/{episode.env}", set()).add(int(game, 16))
    return TrainingEpisodes({name: np.array(sorted(some), dtype=np.uint64) for name, some in hashes.items()})
