"""Committed tables of seen windows are of the committed suites and the shipped checkpoint."""

from __future__ import annotations

from pathlib import Path

import loopwm
from eval.scores.metrics import DATA
from eval.scores.seen import find_seen, load_table, seen_by_checkpoint
from eval.scores.suites import load_suite, suite_names
from loopwm.records.training_episodes import TrainingEpisodes

PRETRAINED = Path(loopwm.__file__).parent / "pretrained"


def test_committed_tables_are_of_the_committed_suites() -> None:
    found = {name: find_seen(load_suite(name), None) for name in suite_names()}
    tables = [load_table(path) for path in DATA.glob("seen-*")]
    assert {table.suite for table in tables} == {name for name, seen in found.items() if seen is not None}
    assert tables


def test_shipped_checkpoint_is_known_and_saw_no_game_of_a_suite() -> None:
    trained = TrainingEpisodes.load(PRETRAINED)
    assert trained is not None
    for name in suite_names():
        suite = load_suite(name)
        table = find_seen(suite, None)
        assert table is not None, f"{name}: make its table with build-seen --model"
        assert seen_by_checkpoint(suite, trained, table, None) is table, f"{name}: make its table again"
