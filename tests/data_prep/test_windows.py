from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.__main__ import main
from data_prep.environments import ENVIRONMENTS, family_of
from data_prep.windows import cut_any, cut_window
from loopwm.records.episodes import Episode, write_episodes
from loopwm.records.errors import InputError
from tests.fixtures.episodes import make_episode
from tests.fixtures.toy import Toy

ROOT = Path(__file__).parents[2]
EPISODES = [
    make_episode(task, v, length=5 + v, hidden_state=f"start of {task} {v}")
    for task in ("boil", "melt", "freeze")
    for v in range(6)
]


def read_windows(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def windows_of(episodes: list[Episode], count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [cut_window(cut, 5, None) for cut in cut_any(episodes, count, 5, seed, "w")]


def test_a_window_is_a_piece_of_its_episode() -> None:
    for window in windows_of(EPISODES, 40):
        episode = next(e for e in EPISODES if (e.task, e.variation) == (window["task"], window["variation"]))
        now = len(window["history"]) - 1
        played = [{"action": s.action, "observation": s.observation} for s in episode.steps]
        ahead = [
            {"action": a, "observation": o} for a, o in zip(window["actions"], window["observations"], strict=True)
        ]
        assert window["history"] + ahead == played[: now + 6]
        assert (window["look"], window["inventory"]) == (episode.steps[now].look, episode.steps[now].inventory)
        assert window["hidden_state_start"] == episode.hidden_state == f"start of {episode.task} {episode.variation}"
        assert window["rewards"] == [10] * 5
        assert window["dones"] == [step.done for step in episode.steps[now + 1 : now + 6]]


def test_windows_differ_and_every_start_that_fits_can_be_drawn() -> None:
    episodes = [make_episode(length=7)]
    windows = windows_of(episodes, 3)
    assert sorted(len(w["history"]) for w in windows) == [1, 2, 3]
    assert len({w["id"] for w in windows}) == 3


def _cut(out: Path, episodes: list[Path], *options: str) -> bytes:
    assert main(["windows", "--episodes", *map(str, episodes), "--out", str(out), *options]) == 0
    return out.read_bytes()


def test_bytes_depend_on_episodes_and_seed_alone(tmp_path: Path) -> None:
    one, two = tmp_path / "all.jsonl.xz", tmp_path / "split"
    write_episodes(one, EPISODES)
    write_episodes(two / "b.jsonl", EPISODES[:7])
    write_episodes(two / "a.jsonl.gz", EPISODES[7:])
    out = tmp_path / "w.jsonl.gz"
    first = _cut(out, [one], "--count", "20")
    assert _cut(out, [two], "--count", "20") == first
    assert _cut(out, [one], "--count", "20", "--seed", "1") != first


def test_windows_carry_every_hidden_state_that_their_episodes_recorded(tmp_path: Path) -> None:
    played = make_episode(length=9, hidden_state="0")
    steps = tuple(replace(s, hidden_state="3") if i == 3 else s for i, s in enumerate(played.steps))
    write_episodes(tmp_path / "e.jsonl", [replace(played, steps=steps)])
    _cut(tmp_path / "w.jsonl.gz", [tmp_path / "e.jsonl"], "--count", "5")
    windows = {len(w["history"]) - 1: w["hidden_state"] for w in read_windows(tmp_path / "w.jsonl.gz")}
    assert windows == {0: "0", 1: None, 2: None, 3: "3", 4: None}


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, ["--count", "9"], "episodes must hold 9 windows, found 4"),
        ({"task": "dance"}, ["--count", "1"], "task: must belong to a family of 'scienceworld', got 'dance'"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_episodes(tmp_path / "e.jsonl", [make_episode(**changes)])
    out = tmp_path / "w.jsonl.gz"
    assert main(["windows", "--episodes", str(tmp_path / "e.jsonl"), "--out", str(out), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_an_episode_too_short_is_never_drawn() -> None:
    episodes: list[Episode] = [make_episode(variation=0, length=4), make_episode(variation=1, length=5)]
    assert {w["variation"] for w in windows_of(episodes, 1, seed=3)} == {1}


def test_an_environment_from_outside_brings_its_families(monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, "toy", Toy)
    assert family_of("toy", "run") == "on foot"
    assert family_of("logs", "walk") == "walk", "tasks of an environment known from logs are families"
    with pytest.raises(InputError, match="must belong to a family of 'toy', got 'swim'"):
        family_of("toy", "swim")
