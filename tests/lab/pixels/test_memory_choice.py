"""The choice at a corridor's end: which episodes count, what a world is shown of them, and the command."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from lab.__main__ import main
from lab.pixels import memory_choice
from loopwm.pixel.checkpoint import save_checkpoint
from loopwm.pixel.edeline.config import EdelineConfig, EdelineLoss
from loopwm.pixel.edeline.memory import MemoryConfig
from loopwm.pixel.edeline.system import Edeline
from loopwm.pixel.edeline.unet import UNetConfig
from loopwm.pixel.imagined import Imagined
from loopwm.records.frames import episode_files, read_episode

MAZES = "minigrid/MemoryS7+MemoryS9@pixels=32"


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    pytest.importorskip("minigrid", reason="pip install 'loopwm[minigrid]'")
    folder = tmp_path_factory.mktemp("frames")
    assert main(["collect-choices", MAZES, "--split", "test", "--episodes", "24", "--out", str(folder)]) == 0
    return folder


def test_episodes_end_at_an_object_by_chance(played):
    episodes = [read_episode(path) for path in episode_files(played)]
    assert all(episode.terminated[-1] for episode in episodes)
    assert 5 < sum(episode.reward[-1] > 0 for episode in episodes) < 19
    assert {int(episode.action[-2]) for episode in episodes} == {memory_choice.LEFT, memory_choice.RIGHT}


def test_those_count_that_saw_the_cue_and_lost_sight_of_it(played):
    for episode in memory_choice.choices(played, 8):
        visible = episode.extras["cue"][:, 0] >= 0
        assert visible[: len(episode) - 5].any()
        assert not visible[len(episode) - 5 : len(episode) - 1].any()
    episode = memory_choice.choices(played, 1)[0]
    never, late = (np.array(episode.extras["cue"]) for _ in range(2))
    never[:] = -1
    late[len(episode) - 2] = 0
    assert not memory_choice.is_valid(replace(episode, extras={**episode.extras, "cue": never}))
    assert not memory_choice.is_valid(replace(episode, extras={**episode.extras, "cue": late}))
    ended = np.zeros(len(episode), bool)
    assert not memory_choice.is_valid(replace(episode, terminated=ended, truncated=episode.terminated))


class Knows:
    """Pays in so many of its futures whoever did get the reward, told by the frames and actions that it is shown."""

    def __init__(self, episodes, knows):
        self.episodes, self.knows = list(episodes), knows

    def start(self, obs, action, first, generator):
        futures = len(obs) // len(self.episodes)
        for row, episode in enumerate(self.episodes):
            begin = int(first[row * futures].nonzero()[-1])
            assert np.array_equal(obs[row * futures, begin:], episode.obs[:-2])
            assert np.array_equal(action[row * futures, begin:], episode.action[:-2])
        return futures, 0

    def step(self, state, action, generator):
        futures, steps = state
        assert action[::futures].tolist() == [int(episode.action[steps - 2]) for episode in self.episodes]
        paid = torch.tensor([bool(episode.reward[-1] > 0) for episode in self.episodes]).repeat_interleave(futures)
        reward = torch.where(paid, 1.0, 0.0) if self.knows else torch.ones(len(action))
        return Imagined(reward * steps, torch.zeros(len(action)).bool(), (futures, steps + 1))


@pytest.mark.parametrize(("knows", "area"), [(True, 1.0), (False, 0.5)])
def test_a_world_is_shown_what_was_before_the_turn_and_asked_for_the_rest(played, knows, area):
    episodes = memory_choice.choices(played, 8)
    score = memory_choice.promised(Knows(episodes, knows), episodes, 3, 0)
    paid = np.array([episode.reward[-1] > 0 for episode in episodes])
    assert memory_choice.area(score, paid) == area


def test_the_area_is_how_often_the_rewarded_are_above():
    score, paid = np.array([0.1, 0.4, 0.4, 0.9]), np.array([False, True, False, True])
    assert memory_choice.area(score, paid) == (1 + 1 + 0.5 + 1) / 4
    found = memory_choice.measured(np.tile(score, 50), np.tile(paid, 50))
    assert found.low < found.area < found.high < 1
    assert (found.episodes, found.paid) == (200, 0.5)


def test_the_command_measures_checkpoints_and_refuses_what_has_no_choice(played, tmp_path, capsys):
    config = EdelineConfig(
        memory=MemoryConfig(dim=16, heads=2, mlp_dim=16),
        unet=UNetConfig((8,), (1,), condition=8, stem=4, heads=1),
        encoder_channels=(4,),
        encoder_stem=4,
        action_dim=4,
        head_hidden=8,
        frames=1,
        burn_in=1,
        rewards=(0.0, 1.0),
    )
    space = read_episode(episode_files(played)[0]).space
    save_checkpoint(Edeline(config, EdelineLoss(), space), tmp_path / "model")
    out = tmp_path / "out"
    command = ["pixels", "memory-choice", f"tiny={tmp_path / 'model'}", "--frames", str(played), "--out", str(out)]
    assert main([*command, "--episodes", "8", "--futures", "2"]) == 0
    found = json.loads((out / "results.json").read_text())["results"]["tiny"]
    assert found["episodes"] == 8
    assert found["low"] <= found["area"] <= found["high"]
    assert main(command) == 2
    assert "episodes end in a choice out of the cue's sight, 500 are asked for" in capsys.readouterr().err
