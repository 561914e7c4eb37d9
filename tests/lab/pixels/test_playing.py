"""Agents measured: episodes counted fairly, and Crafter's score."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from lab.__main__ import main
from lab.pixels import playing
from lab.pixels.playing import crafter_score, evaluate, play_real
from loopwm.pixel.agents.agent_trainer import AgentTrainer
from loopwm.pixel.imagined import RandomPolicy
from loopwm.records.errors import InputError
from tests.fixtures.blocks import SPACE
from tests.pixel.agents.test_agent_trainer import Blocks, blocks, config


def test_the_score_is_crafters():
    assert crafter_score([0.0, 0.0]) == pytest.approx(0)
    assert crafter_score([1.0, 1.0]) == pytest.approx(100)
    assert crafter_score([1.0, 0.0]) == pytest.approx((101 * 1) ** 0.5 - 1)


def test_episodes_are_counted_in_the_order_in_which_they_began():
    """Short episodes come first if one takes what ends first: those that reach the corner, with return 1."""
    policy = RandomPolicy(SPACE.actions, np.random.default_rng(0))
    fair = [play_real(blocks(8), policy, 8, seed).mean_return for seed in range(30)]
    env, returns = blocks(1), []
    for seed in range(240):
        env.reset(seed=seed)
        over, total = False, 0.0
        while not over:
            _, reward, terminated, truncated, _ = env.step(policy(np.zeros((1, 1)), np.zeros(1), {}))
            total, over = total + reward[0], terminated[0] or truncated[0]
        returns.append(total)
    assert np.mean(fair) == pytest.approx(np.mean(returns), abs=0.12)


def test_evaluate_reports_agent_and_random_returns(tmp_path, monkeypatch):
    AgentTrainer(config(), blocks(4), SPACE, tmp_path / "run").run()
    monkeypatch.setattr(playing, "real_environments", lambda name, count: (blocks(count), SPACE))
    results = evaluate(tmp_path / "run", 6, 0)
    assert results["agent"]["episodes"] == results["random"]["episodes"] == 6
    assert 0 <= results["agent"]["low"] <= results["agent"]["mean_return"] <= results["agent"]["high"] <= 1
    assert results["agent"]["score"] is None


def test_an_environment_s_own_metric_is_the_mean_over_episodes_of_what_it_told_last():
    class Judged(Blocks):
        def step(self, action):
            frame, reward, _, _, info = super().step(action)
            return frame, reward, False, self.age >= 7, info | {"metric": 10.0 * self.age}

    env = SyncVectorEnv([Judged] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    chance = RandomPolicy(SPACE.actions, np.random.default_rng(0))
    assert play_real(env, chance, 8, 0).metric == 70
    assert play_real(blocks(2), chance, 2, 0).metric is None


def test_a_run_that_has_not_ended_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(playing, "real_environments", lambda name, count: (blocks(count), SPACE))
    AgentTrainer(config(), blocks(4), SPACE, tmp_path / "run")
    with pytest.raises(InputError, match="the run has saved nothing yet"):
        evaluate(tmp_path / "run", 1, 0)
    assert main(["pixels", "play", "--run", str(tmp_path / "none"), "--out", str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'none' / 'config.yaml'}: ")
