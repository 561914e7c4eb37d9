"""What the lab records of a checkpoint's training is what training itself records."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lab.episodes import training_record
from loopwm.records.training_episodes import TrainingEpisodes
from tests.fixtures.shards import toy_episode, write_toy_shards


def test_the_record_of_episodes_is_that_of_their_shards(tmp_path: Path) -> None:
    write_toy_shards(tmp_path, map(toy_episode, range(5)))
    shards, record = TrainingEpisodes.of_shards([tmp_path]).hashes, training_record(map(toy_episode, range(5))).hashes
    assert record.keys() == shards.keys() == {"episodes/scienceworld", "games/scienceworld"}
    for name, hashes in shards.items():
        assert len(hashes) == 5
        assert np.array_equal(record[name], hashes)
