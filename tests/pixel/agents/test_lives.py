"""A lost life ends returns and not episodes: in play, in the replay, and in what worlds and policies learn from."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from loopwm.pixel.agents.ppo_learner import RolloutCollector, play
from loopwm.pixel.agents.ppo_policy import ActorCritic, PolicyConfig
from loopwm.pixel.imagined import EnvState, RandomPolicy, rollout
from loopwm.pixel.replay import Replay, as_learned
from loopwm.pixel.system import FrameBatch
from loopwm.records.frames import LOST, FrameSpace

SPACE = FrameSpace("lives", "1", (4, 4, 1), 2)


class Lives(gymnasium.Env):
    """A life is lost at every third step, the third ends the game. Each step pays 1."""

    observation_space = gymnasium.spaces.Box(0, 255, SPACE.frame_shape, np.uint8)
    action_space = gymnasium.spaces.Discrete(SPACE.actions)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self._frame(), {LOST: False}

    def step(self, action):
        self.age += 1
        return self._frame(), 1.0, self.age == 9, False, {LOST: self.age % 3 == 0}

    def _frame(self):
        return np.full(SPACE.frame_shape, self.age * 20, np.uint8)


@pytest.fixture
def env():
    return SyncVectorEnv([Lives] * 2, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.fixture
def player():
    torch.manual_seed(0)
    policy = ActorCritic(PolicyConfig(channels=(4,), memory=8, hidden=8), SPACE.frame_shape, SPACE.actions)
    return RolloutCollector(policy, 2, torch.Generator().manual_seed(0))


@pytest.fixture
def played(env):
    return rollout(env, RandomPolicy(2, np.random.default_rng(0)), 12, EnvState.reset(env, 0)).segments


LOST_AT, ENDED_AT, FIRST_AT = [2, 5, 11], [8], [0, 9]


def places(flags):
    return np.flatnonzero(flags).tolist()


def test_play_tells_lost_lives_and_ends_apart(played):
    for row in range(2):
        assert places(played.lost[row]) == LOST_AT
        assert places(played.terminated[row]) == ENDED_AT
        assert places(played.first[row]) == FIRST_AT


def test_what_is_learned_ends_with_a_life_and_remembers_beyond_it(played):
    learned = as_learned(played)
    batch = FrameBatch.of(played)
    for terminated, first in ((learned.terminated, learned.first), (batch.terminated.numpy(), batch.first.numpy())):
        assert places(terminated[0]) == sorted(LOST_AT + ENDED_AT)
        assert places(first[0]) == FIRST_AT


def test_a_replay_keeps_lost_lives_in_order_and_on_disk(played, tmp_path):
    replay = Replay(SPACE, 100)
    replay.add_segments(played, "random", 0)
    back = Replay.load(tmp_path, replay.save(tmp_path))
    for kept in (replay, back):
        drawn = kept.sample(4, 12, np.random.default_rng(0))
        for row in range(4):
            assert places(drawn.lost[row]) == LOST_AT
            assert places(drawn.terminated[row]) == ENDED_AT
            assert places(drawn.first[row]) == FIRST_AT


def test_the_returns_of_a_policy_end_with_a_life_and_its_memory_does_not(env, player):
    trajectories, found = play(env, player, 12, EnvState.reset(env, 0))
    assert places(trajectories.terminated[0]) == sorted(LOST_AT + ENDED_AT)
    assert places(trajectories.first[0]) == FIRST_AT
    assert places(found.segments.terminated[0]) == ENDED_AT
