"""Imagined worlds of frames as Gymnasium environments: the packaged world of Catch, and input that does not fit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from loopwm.pixel.gym import CATCH, ImaginedEnv, make_vector_env, world_folder
from loopwm.pixel.imagined import EnvState, RandomPolicy, painted, rollout
from loopwm.pixel.replay import Replay
from loopwm.records.errors import InputError
from loopwm.records.frames import read_episode, write_episode
from tests.fixtures.blocks import played

NAME = "loopwm/Imagined-v0"


def test_one_world_passes_gymnasiums_checker(recwarn: pytest.WarningsRecorder) -> None:
    env = gymnasium.make(NAME, render_mode="rgb_array")
    check_env(env.unwrapped)
    assert not [str(w.message) for w in recwarn if "checker" in str(w.filename)]
    env.close()


def test_a_vector_of_worlds_restarts_in_the_same_step() -> None:
    envs: Any = gymnasium.make_vec(NAME, num_envs=6, context=4, horizon=3)
    assert envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    policy = RandomPolicy(3, np.random.default_rng(0))
    played_on = rollout(envs, policy, 12, EnvState.reset(envs, 0)).segments
    assert envs.observation_space.shape == (6, 10, 5, 1)
    ended = played_on.terminated | played_on.truncated
    assert played_on.truncated.any()
    assert played_on.terminated.any()
    assert np.array_equal(played_on.first[:, 1:], ended[:, :-1])


def test_one_world_is_a_vector_of_one() -> None:
    one, many = ImaginedEnv(horizon=4), make_vector_env(1, horizon=4)
    rng = np.random.default_rng(0)
    obs, (first, _) = one.reset(seed=3)[0], many.reset(seed=3)
    assert np.array_equal(obs, first[0])
    for _ in range(4):
        action = int(rng.integers(3))
        obs, reward, terminated, truncated, _ = one.step(action)
        frames, rewards, *over, infos = many.step(np.array([action]))
        assert (reward, terminated, truncated) == (rewards[0], over[0][0], over[1][0])
        if terminated or truncated:
            assert np.array_equal(obs, infos["final_obs"][0])  # not the next world's first frame
            break
        assert np.array_equal(obs, frames[0])
    assert terminated or truncated


def test_worlds_are_drawn_as_rgb() -> None:
    envs = make_vector_env(3, render_mode="rgb_array")
    assert envs.render() is None
    obs, _ = envs.reset(seed=0)
    frames = envs.render()
    assert frames is not None
    for frame, shown in zip(obs, frames, strict=True):
        assert shown.dtype == np.uint8
        assert np.array_equal(shown, np.repeat(frame, 3, -1))
    assert make_vector_env(1).render() is None


def test_channels_are_painted_in_different_colours() -> None:
    frame = np.zeros((1, 5, 4), np.uint8)
    frame[0, range(4), range(4)] = 255
    colours = painted(frame)[0]
    assert len({tuple(colour) for colour in colours.tolist()}) == 5
    assert not colours[4].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint": "/nowhere"}, r"/nowhere/config.json: no such file"),
        ({"starts": "/nowhere"}, r"/nowhere: no episodes of frames"),
        ({"render_mode": "human"}, r"render_mode: must be rgb_array or None, got 'human'"),
        ({"horizon": 0}, r"horizon: must be at least 1, got 0"),
        ({"context": 33}, r"context: must be at most model.positions \(32\) frames, got 33"),
        ({"sampling": {"latents": "worst"}}, r"latents: "),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_vector_env(2, **arguments).reset(seed=0)


def test_some_worlds_alone_are_not_reset() -> None:
    envs = make_vector_env(2)
    envs.reset(seed=0)
    with pytest.raises(InputError, match="options: must be none"):
        envs.reset(options={"reset_mask": np.array([True, False])})


def test_a_folder_of_ones_own_is_found_by_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(CATCH, tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    assert world_folder(".") == Path()
    assert world_folder("catch") == CATCH


@pytest.mark.parametrize("name", sorted(folder.name for folder in CATCH.parent.iterdir()))
def test_packaged_worlds_are_made_by_name(name: str) -> None:
    envs = gymnasium.make_vec(NAME, num_envs=3, checkpoint=name)
    obs, _ = envs.reset(seed=0)
    assert obs.shape == envs.observation_space.shape
    assert world_folder(CATCH.parent / name) == world_folder(name) == CATCH.parent / name
    card = json.loads((CATCH.parent / name / "card.json").read_text())
    assert card["environment"] == envs.unwrapped.space.env  # type: ignore[attr-defined]
    (rows,) = [card[name] for name in ("agent", "recorded") if name in card]
    assert all(abs(row["end_real"] - row["end_imagined"]) < 0.05 for row in rows)


def test_packaged_worlds_are_small() -> None:
    assert sum(path.stat().st_size for path in CATCH.parent.rglob("*") if path.is_file()) < 12_000_000


def test_starts_of_another_environment_are_refused(tmp_path: Path) -> None:
    write_episode(tmp_path / "0.npz", played(0))
    with pytest.raises(InputError, match=r"replay: env is 'blocks', expected 'catch'"):
        make_vector_env(2, starts=tmp_path)


def test_starts_of_another_frame_size_are_refused(tmp_path: Path) -> None:
    episode = read_episode(CATCH / "starts" / "000.npz")
    larger = replace(episode.space, frame_shape=(11, 5, 1))
    write_episode(
        tmp_path / "0.npz", replace(episode, space=larger, obs=np.pad(episode.obs, ((0, 0), (1, 0), *2 * [(0, 0)])))
    )
    with pytest.raises(InputError, match=r"replay: frame_shape is \(11, 5, 1\), expected \(10, 5, 1\)"):
        make_vector_env(2, starts=tmp_path)


def test_starts_are_whole_episodes_of_the_game() -> None:
    replay = Replay.from_folder(CATCH / "starts")
    assert len(replay) == 9 * len(list((CATCH / "starts").iterdir()))
    assert sum(path.stat().st_size for path in CATCH.rglob("*") if path.is_file()) < 1_000_000
    assert all(read_episode(path).policy == "random" for path in (CATCH / "starts").iterdir())


def test_registering_imports_no_torch() -> None:
    code = "import sys, loopwm.pixel.gym; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_unchanged_ppo_trains_in_the_packaged_world(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("stable_baselines3")
    from examples import ppo_in_world

    before = sys.argv
    sys.argv = ["ppo_in_world", "--steps", "512", "--episodes", "4"]
    try:
        ppo_in_world.main()
    finally:
        sys.argv = before
    assert "after: real return" in capsys.readouterr().out
