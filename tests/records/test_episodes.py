from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loopwm.records.episodes import format_episode, read_episodes, write_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import line_files, write_lines
from tests.fixtures.episodes import make_episode


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.xz"])
def test_episodes_come_back_as_written_and_bytes_depend_on_them_alone(tmp_path: Path, suffix: str) -> None:
    episodes = [make_episode(variation=v) for v in range(3)]
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    write_episodes(first, episodes)
    write_episodes(second, episodes)
    assert list(read_episodes(first)) == episodes
    assert first.read_bytes() == second.read_bytes()


def _without(field: str) -> dict[str, Any]:
    record = json.loads(format_episode(make_episode()))
    del record[field]
    return record


def _with_step(index: int, **changes: object) -> dict[str, Any]:
    record = json.loads(format_episode(make_episode()))
    record["steps"][index].update(changes)
    return record


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (_without("goal"), "line 2: goal: missing"),
        (_without("steps"), "line 2: steps: missing"),
        ({**_without("goal"), "goal": 3}, "line 2: goal: unexpected int"),
        ({**_without("variation"), "variation": True}, "line 2: variation: unexpected bool"),
        ({**_without("steps"), "steps": []}, "line 2: steps: at least the first observation"),
        (_with_step(2, observation=None), r"line 2: steps\[2\].observation: unexpected NoneType"),
        (_with_step(0, action="look"), r"line 2: steps\[0\].action: null in the first step"),
        (_with_step(1, action=None), r"line 2: steps\[1\].action: null in the first step"),
        (_with_step(1, action=" "), r"line 2: steps\[1\].action: must not be empty"),
        (_with_step(2, look="\ud800"), r"line 2: steps\[2\].look: must be valid Unicode, got a lone surrogate"),
        ({**_without("goal"), "goal": "\udfff"}, "line 2: goal: must be valid Unicode, got a lone surrogate"),
        ([], "line 2: expected a JSON object"),
    ],
)
def test_a_bad_line_is_named_with_file_and_field(tmp_path: Path, record: object, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(format_episode(make_episode()) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(InputError, match=r"bad\.jsonl: " + message):
        list(read_episodes(path))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.xz"])
def test_a_cut_off_file_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cut{suffix}"
    write_episodes(path, [make_episode(variation=v) for v in range(50)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"cut.*unreadable"):
        list(read_episodes(path))


def test_absent_optional_texts_are_null(tmp_path: Path) -> None:
    record = json.loads(format_episode(make_episode()))
    del record["hidden_state"], record["steps"][1]["look"]
    (tmp_path / "e.jsonl").write_text(json.dumps(record) + "\n")
    episode = next(read_episodes(tmp_path / "e.jsonl"))
    assert episode.hidden_state is None
    assert episode.steps[1].look is None


def test_files_of_folders_come_sorted_and_what_is_missing_is_named(tmp_path: Path) -> None:
    for name in ("b.jsonl.xz", "a.jsonl", ".a.jsonl.1.tmp", "plan.json"):
        (tmp_path / name).touch()
    assert [path.name for path in line_files([tmp_path])] == ["a.jsonl", "b.jsonl.xz"]
    with pytest.raises(InputError, match="nowhere: no such file"):
        line_files([tmp_path / "nowhere"])


def test_a_write_that_breaks_off_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_lines(path, _break_off())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def _break_off() -> Iterator[str]:
    yield "half of the new"
    raise KeyboardInterrupt
