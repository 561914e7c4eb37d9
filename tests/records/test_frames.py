"""Frame episodes: what goes into a file comes out, and nothing else is an episode."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace, count_steps, episode_files, read_episode, write_episode
from tests.pixel.made_up import SPACE, make_episode

ARRAYS = ("obs", "action", "reward", "terminated", "truncated")


def test_an_episode_survives_its_file(tmp_path: Path) -> None:
    episode = make_episode(7)
    write_episode(tmp_path / "a.npz", episode)
    back = read_episode(tmp_path / "a.npz")
    assert (back.space, back.seed, back.policy) == (SPACE, 7, "random")
    for name in ARRAYS:
        assert getattr(back, name).dtype == getattr(episode, name).dtype
        assert np.array_equal(getattr(back, name), getattr(episode, name))
    assert back.extras.keys() == {"lives"}
    assert np.array_equal(back.extras["lives"], episode.extras["lives"])
    assert count_steps(tmp_path / "a.npz") == len(back) == 4


def test_the_bytes_depend_on_the_episode_alone(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        write_episode(tmp_path / name, make_episode())
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"obs": np.zeros((4, 2, 3, 1), np.uint8)}, "obs: expected uint8 (5, 2, 3, 1), got uint8 (4, 2, 3, 1)"),
        ({"obs": np.zeros((5, 2, 3, 1), np.float32)}, "obs: expected uint8"),
        ({"action": np.array([0, 1, 200, 2])}, "action: 200 is not one of the 200 of made/up"),
        ({"action": np.array([0, -1, 3, 2])}, "action: -1 is not one of"),
        ({"action": np.zeros(0, np.int64)}, "action: at least one step"),
        ({"reward": np.zeros(4)}, "reward: expected float32"),
        ({"terminated": np.array([False, True, False, False])}, "terminated: true before the last step"),
        ({"extras": {"lives": np.zeros(4)}}, "extras: lives: expected 5 rows"),
        ({"extras": {"lives": np.full(5, None)}}, "extras: lives"),
    ],
)
def test_what_is_no_episode_is_refused_in_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=r"^[^\n]*$") as caught:
        replace(make_episode(), **changes)
    assert str(caught.value).startswith(message)


def test_a_damaged_or_foreign_file_is_one_line_with_its_name(tmp_path: Path) -> None:
    write_episode(tmp_path / "whole.npz", make_episode())
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "short.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.npz").write_text("not an episode")
    (tmp_path / "empty.npz").write_bytes(b"")
    middle = whole.index(b"obs.npy") + 60
    (tmp_path / "flipped.npz").write_bytes(whole[:middle] + bytes(8) + whole[middle + 8 :])
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with (tmp_path / "single.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    for name in ("short", "text", "empty", "flipped", "other", "single", "missing"):
        with pytest.raises(InputError, match=rf"^{tmp_path}/{name}.npz: [^\n]*$"):
            read_episode(tmp_path / f"{name}.npz")


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_episode(tmp_path / "a.npz", make_episode(1))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"a\.npz: No space left"):
        write_episode(tmp_path / "a.npz", make_episode(2))
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
    assert read_episode(tmp_path / "a.npz").seed == 1


def test_only_finished_files_are_listed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no episodes of frames"):
        episode_files(tmp_path)
    for name in ("b.npz", "a.npz", ".c.npz.12.tmp", "plan.json"):
        (tmp_path / name).touch()
    assert [path.name for path in episode_files(tmp_path)] == ["a.npz", "b.npz"]


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (replace(SPACE, env="else"), "env"),
        (replace(SPACE, version="2"), "version"),
        (replace(SPACE, frame_shape=(3, 2, 1)), "frame_shape"),
        (replace(SPACE, actions=5), "actions"),
    ],
)
def test_spaces_that_differ_are_told_apart_by_name(other: FrameSpace, name: str) -> None:
    SPACE.require(SPACE, "replay")
    with pytest.raises(InputError, match=rf"^replay: {name} is .*, expected "):
        SPACE.require(other, "replay")
