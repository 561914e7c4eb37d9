"""Statistics against hand-counted episodes, and the export read back by the library it is meant for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from data_prep.tokenize import TOKENIZER_FILE
from lab.__main__ import main
from lab.data.export_episodes import STEP_FIELDS, to_row
from lab.data.stats import Counter, count_groups, token_counter
from loopwm.records.episodes import format_episode, write_episodes
from loopwm.records.template import CONTEXT_LIMIT, Context, StateSlots, Transition, render_context
from tests.fixtures.episodes import make_episode


def words(text: str) -> int:
    return len(text.split())


def test_export_to_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_episodes(tmp_path / "train.jsonl", [make_episode(length=1)])
    given = ["--episodes", str(tmp_path / "train.jsonl"), "--out", str(tmp_path / "train.jsonl")]
    assert main(["export-episodes", *given]) == 2
    assert f"error: --out: {tmp_path / 'train.jsonl'} must be a folder" in capsys.readouterr().err


def test_counts_of_a_hand_counted_episode() -> None:
    episode = make_episode(length=2)  # goal of boil 0 | boil 0 begins | do 1: boil 0 did 1 | do 2: boil 0 did 2
    group = Counter(words).count(episode)
    assert (group.episodes, group.transitions, group.tokens) == (1, 2, 2 * (2 + 4))
    assert group.contexts == [4 + 3 + 3, 4 + 3 + 3 + (2 + 4 + 3)]
    assert (group.repeated_episodes, group.repeated_transitions, group.cut_share) == (0, 0, 0.0)


def test_a_context_is_as_long_as_what_is_rendered_without_state_slots() -> None:
    episode = make_episode(length=3)
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    history = [Transition(str(step.action), step.observation) for step in episode.steps[1:]]
    begun = Context(episode.goal, episode.steps[0].observation)
    seen = [render_context(replace(begun, history=tuple(history[:k])), StateSlots(in_trunk=False)) for k in range(3)]
    counted = Counter(token_counter(TOKENIZER_FILE)).count(episode).contexts
    assert counted == [len(tokenizer.encode(text, add_special_tokens=False).ids) for text in seen]


def test_repetitions_are_those_of_the_same_variation() -> None:
    counter = Counter(words)
    counter.count(make_episode(length=4))
    longer = counter.count(make_episode(length=6))
    assert (longer.repeated_episodes, longer.repeated_transitions) == (0, 4)
    again = counter.count(make_episode(length=6))
    assert (again.repeated_episodes, again.repeated_transitions) == (1, 6)
    other = counter.count(make_episode(variation=1, length=6))
    assert (other.repeated_episodes, other.repeated_transitions) == (0, 0)


def test_contexts_over_the_limit_are_counted() -> None:
    group = Counter(lambda text: CONTEXT_LIMIT // 4).count(make_episode(length=3))
    assert group.contexts[0] == CONTEXT_LIMIT // 2 + 3
    assert group.cut_share == pytest.approx(2 / 3)


def test_groups_add_up() -> None:
    tables = count_groups([make_episode(task, v) for task in ("boil", "melt") for v in range(3)], words)
    assert tables["family"].keys() == {"scienceworld, Boil", "scienceworld, Melt"}
    for groups in tables.values():
        assert sum(group.transitions for group in groups.values()) == 6 * 8


def test_the_command_writes_table_numbers_and_plot(tmp_path: Path, episode_file: Path) -> None:
    assert main(["stats", "--episodes", str(episode_file), "--out", str(tmp_path / "stats")]) == 0
    assert "| scienceworld | 6 | 48 |" in (tmp_path / "stats/statistics.md").read_text()
    numbers = json.loads((tmp_path / "stats/statistics.json").read_text())
    assert numbers["environment"]["scienceworld"]["transitions"] == 48
    assert (tmp_path / "stats/statistics.png").read_bytes().startswith(b"\x89PNG")


def from_row(row: dict[str, Any]) -> dict[str, Any]:
    """The record of `loopwm.records.episodes` that the row came from."""
    steps = [dict(zip(STEP_FIELDS, values, strict=True)) for values in zip(*(row[n] for n in STEP_FIELDS), strict=True)]
    start, *later = row["hidden_states"]
    for step, hidden_state in zip(steps[1:], later, strict=True):
        step |= {} if hidden_state is None else {"hidden_state": hidden_state}
    variation = int(row["variation"]) if row["variation"].isdecimal() else row["variation"]
    kept = {name: value for name, value in row.items() if name not in (*STEP_FIELDS, "hidden_states")}
    return {**kept, "variation": variation, "hidden_state": start, "steps": steps}


@pytest.mark.parametrize("variation", [3, "trial_T20190907_174127_043461"])
def test_an_exported_row_is_the_episode_again(variation: int | str) -> None:
    episode = make_episode(variation=variation, hidden_state="a hidden room")
    steps = [replace(s, hidden_state=f"room {i}" if i in (4, 8) else None) for i, s in enumerate(episode.steps)]
    episode = replace(episode, steps=tuple(steps))
    assert from_row(to_row(episode)) == json.loads(format_episode(episode))


def test_the_export_is_loaded_by_datasets(tmp_path: Path, episode_file: Path) -> None:
    from datasets import load_dataset

    test_file = tmp_path / "test.jsonl"
    write_episodes(test_file, [make_episode("freeze", split="test")])
    out = tmp_path / "export"
    assert main(["export-episodes", "--episodes", str(episode_file), str(test_file), "--out", str(out)]) == 0
    found = load_dataset(str(out), cache_dir=str(tmp_path / "cache"))
    assert {split: len(rows) for split, rows in found.items()} == {"train": 6, "test": 1}
    first = make_episode("boil", 0)
    assert from_row(found["train"][0]) == json.loads(format_episode(first))
    assert main(["export-episodes", "--episodes", str(test_file), "--out", str(out)]) == 2
