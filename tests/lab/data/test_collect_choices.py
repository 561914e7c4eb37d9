"""Play of mazes that chooses a side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lab.__main__ import main
from loopwm.records.frames import FrameEpisode, episode_files, read_episode

MAZE = "minigrid/MemoryS7@pixels=32"


def played(out: Path, *options: str) -> list[FrameEpisode]:
    pytest.importorskip("minigrid", reason="pip install 'loopwm[minigrid]'")
    assert main(["collect-choices", MAZE, "--split", "train", *options, "--out", str(out)]) == 0
    return [read_episode(path) for path in episode_files(out)]


def test_a_maze_tells_that_its_task_is_done_where_it_pays(tmp_path: Path) -> None:
    episodes = played(tmp_path, "--episodes", "12")
    for episode in episodes:
        assert np.array_equal(episode.extras["metric"][1:], episode.reward > 0)
        assert episode.extras["metric"][0] == 0
    assert {float(episode.extras["metric"][-1]) for episode in episodes} == {0.0, 1.0}


def test_episodes_name_their_policy_and_record_the_cue(tmp_path: Path) -> None:
    episode, _ = played(tmp_path, "--episodes", "2", "--max-steps", "40")
    assert episode.policy == "choose"
    assert set(episode.action.tolist()) <= {0, 1, 2, 6}
    assert episode.extras["cue"].shape == (len(episode.action) + 1, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((MAZE, "--policy", "random"), "--policy: must be left out, got random"),
        (("crafter",), "environment: must be of minigrid, got 'crafter'"),
    ],
)
def test_other_policies_and_environments_are_refused(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["collect-choices", *options, "--split", "train", "--steps", "9", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not (tmp_path / "out").exists()
