"""Replay: segments are what was played, every possible start is as likely, and a resumed replay is the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loopwm.pixel.replay import Replay, Segments, prune
from loopwm.records.errors import InputError
from loopwm.records.frames import read_episode, write_episode
from tests.pixel.made_up import SPACE, make_episode

FIELDS = tuple(Segments.__dataclass_fields__)


def three_episodes(capacity: int = 100) -> Replay:
    """Steps 10 to 13, 20 to 22 and, open in another stream, 30 to 35."""
    replay = Replay(SPACE, capacity)
    replay.add(make_episode(10, 4))
    replay.add(make_episode(20, 3))
    replay.add(make_episode(30, 6, ends=False), stream=1)
    return replay


def sample_many(replay: Replay, length: int, seed: int = 0) -> Segments:
    return replay.sample(4000, length, np.random.default_rng(seed))


def equal(a: Segments, b: Segments) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in FIELDS)


def test_segments_are_consecutive_steps_and_cross_from_one_episode_into_the_next() -> None:
    found = sample_many(three_episodes(), 3)
    following = {i: i + 1 for i in (*range(10, 13), *range(20, 22), *range(30, 35))} | {13: 20}
    for before, after in zip(found.action[:, :-1].ravel(), found.action[:, 1:].ravel(), strict=True):
        assert following[before] == after
    assert np.array_equal(found.obs[..., 0, 0, 0], found.action)
    assert np.array_equal(found.next_obs[..., 0, 0, 0], found.action + 1)  # an episode's last frame included
    assert np.array_equal(found.reward, found.action)
    assert np.array_equal(found.first, np.isin(found.action, (10, 20, 30)))
    assert np.array_equal(found.terminated, np.isin(found.action, (13, 22)))
    assert not found.truncated.any()
    assert found.obs.dtype == found.next_obs.dtype == np.uint8
    assert (found.action.dtype, found.reward.dtype, found.first.dtype) == (np.int64, np.float32, bool)
    assert found.obs.shape == (4000, 3, *SPACE.frame_shape)


def test_every_possible_start_is_as_likely() -> None:
    starts, counts = np.unique(sample_many(three_episodes(), 3).action[:, 0], return_counts=True)
    assert starts.tolist() == [10, 11, 12, 13, 20, 30, 31, 32, 33]
    expected = 4000 / 9
    assert ((counts - expected) ** 2 / expected).sum() < 26.1  # chi-squared, 8 degrees of freedom, p = 0.001


def test_a_generator_in_the_same_state_draws_the_same() -> None:
    assert equal(sample_many(three_episodes(), 2, seed=3), sample_many(three_episodes(), 2, seed=3))
    assert not equal(sample_many(three_episodes(), 2, seed=3), sample_many(three_episodes(), 2, seed=4))


def test_frames_after_the_steps_can_be_left_out() -> None:
    replay = three_episodes()
    whole, half = (replay.sample(40, 3, np.random.default_rng(3), following=following) for following in (True, False))
    assert half.next_obs.shape == (40, 0, *SPACE.frame_shape)
    assert whole.next_obs.shape == whole.obs.shape
    for name in set(vars(whole)) - {"next_obs"}:
        assert np.array_equal(getattr(half, name), getattr(whole, name))


def test_pieces_of_one_episode_are_joined_without_a_seam() -> None:
    whole, pieces = Replay(SPACE, 100), Replay(SPACE, 100)
    whole.add(make_episode(10, 9))
    for start, steps, ends in ((10, 2, False), (12, 3, False), (15, 4, True)):
        pieces.add(make_episode(start, steps, ends), stream=5)
    for length in (1, 4, 9):
        assert equal(sample_many(whole, length), sample_many(pieces, length))


def test_a_piece_that_does_not_continue_its_stream_is_refused_and_changes_nothing() -> None:
    replay = three_episodes()
    with pytest.raises(InputError, match="last frame of stream 1's open episode"):
        replay.add(make_episode(50), stream=1)
    replay.add(make_episode(36), stream=1)
    assert len(replay) == 17


def test_the_oldest_go_first_and_what_is_left_of_an_episode_is_no_beginning() -> None:
    replay = Replay(SPACE, 7)
    replay.add(make_episode(10, 3, ends=False))
    replay.add(make_episode(13, 3))
    assert len(replay) == 6
    replay.add(make_episode(30, 4), stream=1)
    assert len(replay) == 7
    found = sample_many(replay, 1)
    assert set(found.action.ravel()) == {13, 14, 15, 30, 31, 32, 33}
    assert set(found.action[found.first]) == {30}


def test_a_stream_that_lost_everything_still_goes_on() -> None:
    replay = Replay(SPACE, 4)
    replay.add(make_episode(10, 3, ends=False))
    replay.add(make_episode(30, 4), stream=1)
    replay.add(make_episode(13, 2))
    found = sample_many(replay, 1)
    assert set(found.action.ravel()) == {13, 14}
    assert not found.first.any()


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (replace(SPACE, env="other"), "episode: env is 'other', expected 'made/up'"),
        (replace(SPACE, version="2"), "episode: version is '2'"),
        (replace(SPACE, actions=300), "episode: actions is 300"),
    ],
)
def test_another_environment_is_refused_in_one_line(space: object, message: str) -> None:
    replay = three_episodes()
    with pytest.raises(InputError) as caught:
        replay.add(make_episode(space=space))
    assert str(caught.value).startswith(message)
    assert len(replay) == 13


def test_what_cannot_be_kept_or_sampled_is_one_line() -> None:
    with pytest.raises(InputError, match="capacity: must be at least 1, got 0"):
        Replay(SPACE, 0)
    with pytest.raises(InputError, match=r"must have at most 3 steps \(capacity\), got 4"):
        Replay(SPACE, 3).add(make_episode())
    with pytest.raises(InputError, match=r"length: must be 1 to 7 steps \(longest stream\), got 8"):
        sample_many(three_episodes(), 8)
    with pytest.raises(InputError, match="length: must be 1 to 0 steps"):
        sample_many(Replay(SPACE, 3), 1)
    with pytest.raises(InputError, match=r"length: .*, got 0"):
        sample_many(three_episodes(), 0)


def test_a_folder_is_read_in_order_and_holds_one_environment(tmp_path: Path) -> None:
    write_episode(tmp_path / "1.npz", make_episode(20, 3))
    write_episode(tmp_path / "0.npz", make_episode(10, 4))
    replay = Replay.from_folder(tmp_path)
    assert (len(replay), replay.capacity) == (7, 7)
    assert [episode.seed for episode in replay.episodes()] == [10, 20]
    write_episode(tmp_path / "2.npz", make_episode(space=replace(SPACE, version="2")))
    with pytest.raises(InputError, match=rf"^{tmp_path}/2.npz: episode: version is '2', expected '1'$"):
        Replay.from_folder(tmp_path)


def test_a_resumed_replay_is_the_same_and_writes_only_what_is_new(tmp_path: Path) -> None:
    replay = three_episodes(capacity=14)
    state = json.loads(json.dumps(replay.save(tmp_path)))
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    back = Replay.load(tmp_path, state)
    assert equal(sample_many(back, 3), sample_many(replay, 3))
    for both in (replay, back):
        both.add(make_episode(36, 5), stream=1)  # drops the first of stream 0
        both.add(make_episode(60, 2))
    assert len(back) == len(replay) == 13 + 5 + 2 - 4 - 3
    assert equal(sample_many(back, 3), sample_many(replay, 3))
    later = back.save(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert len(list(tmp_path.iterdir())) == 5
    assert equal(sample_many(Replay.load(tmp_path, state), 3), sample_many(three_episodes(), 3))
    prune(tmp_path, [later])
    assert len(list(tmp_path.iterdir())) == len(later["pieces"]) == 3
    assert equal(sample_many(Replay.load(tmp_path, later), 3), sample_many(replay, 3))


def test_files_of_a_run_that_was_cut_off_are_written_over(tmp_path: Path) -> None:
    state = three_episodes().save(tmp_path)
    cut_off = Replay.load(tmp_path, state)
    cut_off.add(make_episode(70))
    cut_off.save(tmp_path)
    again = Replay.load(tmp_path, state)
    again.add(make_episode(80))
    again.save(tmp_path)
    assert read_episode(tmp_path / "00000003.npz").seed == 80


def test_a_lost_file_of_a_replay_is_one_line(tmp_path: Path) -> None:
    state = three_episodes().save(tmp_path)
    (tmp_path / "00000001.npz").unlink()
    with pytest.raises(InputError, match=rf"^{tmp_path}/00000001.npz: [^\n]*$"):
        Replay.load(tmp_path, state)


def test_shares_are_of_parts_by_age_whatever_the_streams() -> None:
    """Eight single steps added in turn to two streams, told apart by their reward."""
    replay = Replay(SPACE, 100)
    for number in range(8):
        replay.add(make_episode(number, 1), stream=number % 2)
    rng = np.random.default_rng(0)
    shares = (0.1, 0.0, 0.2, 0.7)
    drawn = replay.sample(8000, 1, rng, shares).reward[:, 0].astype(int)
    found = np.bincount(drawn, minlength=8) / 8000
    assert np.allclose(found, np.repeat(shares, 2) / 2, atol=0.02)
    assert np.allclose(np.bincount(replay.sample(8000, 1, rng).reward[:, 0].astype(int)) / 8000, 1 / 8, atol=0.02)
    replay.sample(1, 1, rng, (0.333333, 0.333333, 0.333333))  # rounded, as a configuration has them
    replay.add(make_episode(8, 1))
    assert 8 in replay.sample(1000, 1, rng, shares).reward


def test_an_open_episode_of_a_folder_is_not_continued_by_the_next_file(tmp_path: Path) -> None:
    for number, start in enumerate((10, 50)):
        write_episode(tmp_path / f"{number}.npz", make_episode(start, 4, ends=False))
    replay = Replay.from_folder(tmp_path)
    assert len(replay) == 8
