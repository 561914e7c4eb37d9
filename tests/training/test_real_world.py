"""Agents in training are given real environments by Gymnasium."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from data_prep.environments.pixels.by_name import make_frame_vector
from loopwm.pixel.gym import FRAMES, real_environment, real_environments
from loopwm.records.errors import InputError


def test_real_environments_are_the_simulators_themselves() -> None:
    env, space = real_environments("catch", 3)
    same = make_frame_vector("catch", 3)
    assert (env.num_envs, space.env) == (3, "catch")
    assert env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    assert np.array_equal(env.reset(seed=4)[0], same.reset(seed=4)[0])
    for _ in range(12):
        for ours, theirs in zip(env.step(np.ones(3, int))[:4], same.step(np.ones(3, int))[:4], strict=True):
            assert np.array_equal(ours, theirs)
    assert type(real_environment("catch")) is type(same.envs[0])
    assert FRAMES.partition(":")[2] in gymnasium.registry


def test_a_name_that_is_unknown_is_one_line_with_its_key() -> None:
    with pytest.raises(InputError, match=r"^real.environment: environment: must be one of catch"):
        real_environments("pong", 2)
