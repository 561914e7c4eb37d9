"""Packs against suites: no game to evaluate on is among those to train on."""

from __future__ import annotations

from collections import defaultdict

import pytest

from data_prep.solutions import PACKED
from eval.scores.suites import load_suite, suite_names
from lab.data.unpack import EPISODES, SUFFIX, members
from loopwm.records.episodes import TRAIN_SPLITS, parse_episode
from loopwm.records.windows import game_of


@pytest.mark.slow
def test_packs_to_train_on_hold_no_game_of_a_suite() -> None:
    """Packs of dev hold games of no other suites than those of dev."""
    played: defaultdict[str, set[str]] = defaultdict(set)
    for pack in sorted(PACKED.glob(f"*{SUFFIX}")):
        for name, content in members(pack):
            for line in content.decode().splitlines() if name.endswith(EPISODES) else ():
                episode = parse_episode(line)
                split = "train" if episode.split in TRAIN_SPLITS else episode.split
                played[split].add(f"{episode.env}/{episode.task}/{episode.variation}")
    assert played.keys() == {"train", "dev"}
    assert not played["train"] & played["dev"]
    for suite in suite_names():
        games = {game_of(window) for window in load_suite(suite).windows}
        assert not games & played["train"], suite
        assert "-dev" in suite or not games & played["dev"], suite
