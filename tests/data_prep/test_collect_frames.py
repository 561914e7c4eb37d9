"""Frames are collected as they were played: a collection that was killed goes on, options are checked first."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import collect_frames
from data_prep.__main__ import main
from data_prep.collect_frames import FramePlan
from data_prep.environments.pixels import by_name
from data_prep.environments.pixels.base import Outcome
from loopwm.records.frames import FrameSpace, episode_files, read_episode


class Toy:
    """A game of 3 to 9 steps that shows how often each action was taken; dies in the `fatal`-th step of all."""

    space = FrameSpace("toy", "1", (1, 4, 1), 4)
    fatal: int | None = None
    steps = 0

    def begin(self, seed: int) -> tuple[Any, dict[str, Any]]:
        self.frame, self.left = np.zeros((1, 4, 1), np.uint8), 3 + seed % 7
        return self.frame.copy(), {"left": self.left}

    def act(self, action: int) -> Outcome:
        Toy.steps += 1
        if Toy.steps == Toy.fatal:
            raise KeyboardInterrupt
        self.frame[0, action] += 1
        self.left -= 1
        return Outcome(self.frame.copy(), 1.0, self.left == 0, False, {"left": self.left})

    def close(self) -> None: ...


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "steps", 0)
    monkeypatch.setattr(Toy, "fatal", None)
    monkeypatch.setitem(by_name.SINGLE, "toy", Toy)


def collect(out: Path, *options: str) -> int:
    return main(["collect", "toy", "--split", "train", "--out", str(out), *options])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.usefixtures("toy")
def test_a_collection_that_was_killed_goes_on_to_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert collect(tmp_path / "whole", "--steps", "60") == 0
    for fatal in (1, 20, 15):
        monkeypatch.setattr(Toy, "steps", 0)
        monkeypatch.setattr(Toy, "fatal", fatal)
        with pytest.raises(KeyboardInterrupt):
            collect(tmp_path / "killed", "--steps", "60")
    monkeypatch.setattr(Toy, "fatal", None)
    assert collect(tmp_path / "killed", "--steps", "60") == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("toy")
def test_what_is_collected_is_enough_and_not_an_episode_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect(tmp_path, "--steps", "60") == 0
    episodes = [read_episode(path) for path in episode_files(tmp_path)]
    assert sum(map(len, episodes)) >= 60 > sum(map(len, episodes[:-1]))
    said = capsys.readouterr().out
    assert f"{len(episodes)} episodes, {sum(map(len, episodes))} transitions" in said
    for i, episode in enumerate(episodes):
        assert episode.seed == FramePlan("toy", "train", 0, None).episode_seed(i)
        assert np.array_equal(episode.obs[-1].ravel(), np.bincount(episode.action, minlength=4))
        assert np.array_equal(episode.extras["left"], np.arange(len(episode), -1, -1))
        assert not episode.open
    before = contents(tmp_path)
    assert collect(tmp_path, "--episodes", str(len(episodes) + 2)) == 0
    assert contents(tmp_path).items() > before.items()
    assert len(contents(tmp_path)) == len(before) + 2


@pytest.mark.usefixtures("toy")
def test_a_limit_truncates(tmp_path: Path) -> None:
    assert collect(tmp_path, "--episodes", "9", "--max-steps", "6") == 0
    episodes = [read_episode(path) for path in episode_files(tmp_path)]
    assert all(len(episode) <= 6 and episode.truncated[-1] != episode.terminated[-1] for episode in episodes)
    assert {bool(episode.truncated[-1]) for episode in episodes} == {True, False}


def test_splits_and_seeds_never_share_an_episode() -> None:
    last = collect_frames.RANGE - 1
    plans = [FramePlan("toy", split, seed, None) for split in collect_frames.SPLITS for seed in (0, 1, last)]
    ranges = [(plan.episode_seed(0), plan.episode_seed(last)) for plan in plans]
    assert all(end < start for (_, end), (start, _) in pairwise(ranges))


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "9", "--split", "valid"), "--split: must be one of train, dev, test, got 'valid'"),
        (("--steps", "9", "--seed", "-1"), "--seed: must be 0 to "),
        ((), "--steps: must be given"),
        (("--steps", "9", "--policy", "gold"), "--policy: must be one of random for frames, got 'gold'"),
        (("--steps", "9", "--episodes-per-task", "2"), "--episodes-per-task: not an option for frames"),
        (("--steps", "9", "--workers", "2"), "--workers: not an option for frames"),
    ],
)
def test_bad_options_are_one_line_and_write_nothing(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect(tmp_path, *options) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("toy")
def test_a_folder_begun_otherwise_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert collect(tmp_path, "--steps", "9") == 0
    before = contents(tmp_path)
    assert collect(tmp_path, "--steps", "20", "--seed", "1") == 2
    assert "plan.json: seed: must be 0 as in the folder, got 1" in capsys.readouterr().err
    monkeypatch.setattr(Toy, "space", FrameSpace("toy", "2", (1, 4, 1), 4))
    assert collect(tmp_path, "--steps", "20") == 2
    assert "plan.json: space: must be" in capsys.readouterr().err
    assert contents(tmp_path) == before
    (tmp_path / "plan.json").write_text("")
    assert collect(tmp_path, "--steps", "20") == 2
    assert "plan.json: unreadable" in capsys.readouterr().err


def test_text_environments_still_ask_for_their_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["collect", "scienceworld", "--split", "train", "--out", str(tmp_path)]
    assert main(arguments) == 2
    assert "--episodes-per-task: must be given" in capsys.readouterr().err
    assert main([*arguments, "--episodes-per-task", "1", "--steps", "5"]) == 2
    assert "--steps: only for frames" in capsys.readouterr().err
