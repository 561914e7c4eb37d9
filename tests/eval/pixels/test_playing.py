"""Agents measured: episodes counted fairly, Crafter's score, the gap to imagination, and the filmstrip."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from PIL import Image

from eval.__main__ import main
from eval.pixels import playing
from eval.pixels.command import RENAMED
from eval.pixels.curve import read_curve, smoothed
from eval.pixels.playing import RolloutStats, crafter_score, evaluate, play_real
from loopwm.pixel.agents.agent_trainer import AgentTrainer
from loopwm.pixel.imagined import RandomPolicy
from loopwm.records.errors import InputError
from loopwm.records.frames import episode_files, read_episode
from loopwm.training.__main__ import main as train
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


def test_an_agent_is_measured_in_the_real_and_in_its_own_world(tmp_path, monkeypatch):
    AgentTrainer(config(), blocks(4), SPACE, tmp_path / "run").run()
    monkeypatch.setattr(playing, "real_environments", lambda name, count: (blocks(count), SPACE))
    results = evaluate(tmp_path / "run", 6, 2, 0)
    assert results["agent"]["episodes"] == results["random"]["episodes"] == 6
    assert 0 <= results["agent"]["low"] <= results["agent"]["mean_return"] <= results["agent"]["high"] <= 1
    for name in ("reward", "ends"):
        assert results[f"{name}_gap"] == pytest.approx(results[f"imagined_{name}"] - results["agent"][name])
    assert 0 < results["agent"]["ends"] < 1
    for name in ("agent_rollouts", "random_rollouts"):
        assert all(0 <= results[name][where]["ended"] <= 1 for where in ("real", "imagined"))
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


def test_a_recorded_episode_is_one_from_its_beginning_to_its_end(tmp_path, monkeypatch):
    AgentTrainer(config(), blocks(4), SPACE, tmp_path / "run").run()
    monkeypatch.setattr(playing, "real_environments", lambda name, count: (blocks(count), SPACE))
    out = tmp_path / "episode.npz"
    assert main(["pixels", "record", "--run", str(tmp_path / "run"), "--steps", "40", "--out", str(out)]) == 0
    found = read_episode(out)
    assert found.policy == "agent"
    assert found.terminated[-1] | found.truncated[-1]
    assert not (found.terminated | found.truncated)[:-1].any()


def test_rollout_stats_count_rewards_up_to_its_first_end():
    reward = np.array([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]])
    terminated = np.array([[False, True, True], [False, False, False]])
    found = SimpleNamespace(segments=SimpleNamespace(reward=reward, terminated=terminated))
    assert RolloutStats.of([found, found]) == RolloutStats(reward=(3 + 7) / 2, ended=0.5)


def test_a_run_that_has_not_ended_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(playing, "real_environments", lambda name, count: (blocks(count), SPACE))
    AgentTrainer(config(), blocks(4), SPACE, tmp_path / "run")
    with pytest.raises(InputError, match="the run has not ended"):
        evaluate(tmp_path / "run", 1, 1, 0)
    assert main(["pixels", "play", "--run", str(tmp_path / "none"), "--out", str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'none' / 'config.yaml'}: ")


def test_filmstrip_has_rows_for_truth_and_each_sampling(frames, twisted_config, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(["--config", str(twisted_config), "--out", str(run), "run.steps=2"]) == 0
    episode = max(episode_files(frames / "test"), key=lambda path: path.stat().st_size)
    common = ["pixels", "filmstrip", "--model", str(run / "model"), "--episode", str(episode)]
    common += ["--sampling", "argmax={decoder: {kind: argmax}}"]
    common += ["--sampling", "transport={decoder: {kind: transport, c_d: 0.05, c_w: 0.6}}"]
    arguments = [*common, "--start", "2", "--context", "2", "--steps", "4", "--out", str(tmp_path / "sheet.png")]
    assert main(arguments) == 0
    width, height = Image.open(tmp_path / "sheet.png").size
    assert width > height
    film = [word if word != "filmstrip" else "film" for word in arguments[:-1]]
    assert main([*film, str(tmp_path / "film.gif")]) == 0
    shown = Image.open(tmp_path / "film.gif")
    assert (shown.n_frames, shown.size[0] > 2 * shown.size[1]) == (4, True)
    assert main([*common, "--steps", "400", "--out", str(tmp_path / "none.png")]) == 2
    assert "--steps: must be <= " in capsys.readouterr().err
    assert main([*arguments, "--sampling", "other={dekoder: {}}"]) == 2
    assert "dekoder: unknown key" in capsys.readouterr().err
    assert not (tmp_path / "none.png").exists()


def test_a_curve_is_the_mean_return_by_interactions(tmp_path, capsys):
    for name, level in (("a", 1.0), ("b", 3.0)):
        (tmp_path / name).mkdir()
        lines = [{"interactions": 10 * i, **({"return": level * i} if i % 2 else {})} for i in range(1, 9)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = smoothed(read_curve(tmp_path / "b"), 2, 80)
    assert found.tolist() == [[40, 3 * (1 + 3) / 2], [80, 3 * (5 + 7) / 2]]
    picture = tmp_path / "curve.png"
    assert main(["pixels", "curve", f"both={tmp_path / 'a'},{tmp_path / 'b'}", "--out", str(picture)]) == 0
    assert Image.open(picture).size[0] > 100
    assert main(["pixels", "curve", f"none={tmp_path / 'c'}", "--out", str(picture)]) == 2
    assert capsys.readouterr().err.strip() == f"error: {tmp_path / 'c' / 'metrics.jsonl'}: no such file"


@pytest.mark.parametrize(("name", "command"), RENAMED.items())
def test_renamed_task_prints_new_command_with_status_2(name, command, capsys):
    assert main(["pixels", name, "--model", "x", "NAME=DIR", "--out", "y"]) == 2
    assert capsys.readouterr().err == f"error: eval pixels {name}: use python -m {command}\n"
