"""Environments of frames: a seed decides an episode, frames and actions are those of the space."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.environments.pixels.base import FrameEnvironment
from data_prep.environments.pixels.by_name import make_frame_environment, make_frame_vector
from loopwm.pixel.imagined import EnvState, RandomPolicy, rollout
from loopwm.pixel.replay import Replay
from loopwm.records.errors import InputError

SIMULATORS = {
    "catch": "numpy",
    "catch-drift": "numpy",
    "crafter": "crafter",
    "minatar/breakout": "minatar",
    "minatar/seaquest": "minatar",
    "atari/Breakout": "ale_py",
    "minigrid/MemoryS7": "minigrid",
}
GEOMETRY = {
    "catch": ((10, 5, 1), 3),
    "catch-drift": ((10, 5, 1), 3),
    "crafter": ((63, 63, 3), 17),
    "minatar/breakout": ((10, 10, 4), 3),
    "minatar/seaquest": ((10, 10, 10), 6),
    "atari/Breakout": ((64, 64, 3), 4),
    "minigrid/MemoryS7": ((64, 64, 3), 7),
}


def make(name: str) -> FrameEnvironment:
    """The environment, or a skipped test where its simulator is not installed."""
    pytest.importorskip(SIMULATORS[name], reason=f"pip install 'loopwm[{name.partition('/')[0]}]'")
    return make_frame_environment(name)


def play(env: FrameEnvironment, seed: int, actions: int = 12) -> list[Any]:
    """Frames and results of a short play of random actions."""
    rng = np.random.default_rng(seed)
    seen: list[Any] = [env.reset(seed=seed)]
    for _ in range(actions):
        seen.append(env.step(rng.integers(env.space.actions)))
        if seen[-1][2] or seen[-1][3]:
            break
    return seen


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        np.array_equal(x[0], y[0]) and x[1:-1] == y[1:-1] for x, y in zip(a[1:], b[1:], strict=True)
    ) and np.array_equal(a[0][0], b[0][0])  # fmt: skip


@pytest.mark.parametrize("name", SIMULATORS)
def test_a_seed_decides_an_episode_whatever_was_played_before(name: str) -> None:
    env = make(name)
    first = play(env, seed=3)
    play(env, seed=4)
    assert same(play(env, seed=3), first)
    assert same(play(make_frame_environment(name), seed=3), first)
    assert not same(play(env, seed=5), first)
    env.close()


@pytest.mark.parametrize("name", SIMULATORS)
def test_frames_and_actions_are_those_of_the_space(name: str) -> None:
    env = make(name)
    assert (env.space.env, env.space.frame_shape, env.space.actions) == (name, *GEOMETRY[name])
    seen = play(env, seed=0)
    assert all(step[0].dtype == np.uint8 and step[0].shape == env.space.frame_shape for step in seen)
    assert all(step[0].any() for step in seen)
    info = [step[-1].keys() for step in seen]
    assert all(names == info[0] for names in info)
    env.reset(seed=0)
    for action in (-1, env.space.actions, 0.5):
        with pytest.raises(InputError, match=rf"^action: must be below {env.space.actions} for {name}, got .*$"):
            env.step(action)  # type: ignore[arg-type]
    env.close()


def test_crafter_removes_the_same_creatures_in_whatever_order_a_set_has_them() -> None:
    make("crafter")
    from data_prep.environments.pixels.crafter import PIXELS, _make

    def places(backwards: bool) -> list[tuple[int, ...]]:
        env = _make(PIXELS)
        env._seed = 1
        env.reset()
        world = env._world
        for _ in range(30):
            for chunk, things in world.chunks.items():
                ordered = sorted(things, key=lambda thing: tuple(thing.pos), reverse=backwards)
                env._balance_chunk(chunk, ordered)
        return sorted(tuple(thing.pos.tolist()) for thing in world.objects)

    assert places(backwards=False) == places(backwards=True)


def test_crafter_tells_what_is_in_sight_and_what_was_achieved() -> None:
    env = make("crafter")
    constants = importlib.import_module("crafter.constants")

    simulator = env._simulator._env  # type: ignore[attr-defined]
    creatures = [number for kind, number in simulator._sem_view._obj_ids.items() if kind.__name__ in CREATURES]
    rng, flags, rewarded = np.random.default_rng(0), [], []
    _, before = env.reset(seed=12)
    for _ in range(150):
        _, reward, terminated, _, info = env.step(rng.integers(17))
        padded = np.pad(simulator._sem_view(), 9)
        x, y = simulator._player.pos + 9
        in_sight = padded[x - 4 : x + 5, y - 3 : y + 4]
        assert info["creature"] == np.isin(in_sight, creatures).any()
        flags.append(info["creature"])
        new = (info["achievements"] > 0) & (before["achievements"] == 0)
        assert new.any() == (reward > 0.5)
        rewarded.append(new.any())
        before = info
        if terminated:
            break
    assert set(flags) == {True, False}
    assert sum(rewarded) > 0
    assert len(constants.achievements) == len(before["achievements"]) == 22
    assert [name for name, count in zip(constants.achievements, before["achievements"], strict=True) if count] == [
        name for name in constants.achievements if simulator._player.achievements[name]
    ]


CREATURES = ("Cow", "Zombie", "Skeleton")


def test_crafter_tells_death_from_the_end_of_time() -> None:
    env = make("crafter")
    simulator = env._simulator._env  # type: ignore[attr-defined]
    env.reset(seed=0)
    simulator._length = 3
    ends = [env.step(np.int64(0))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    env.reset(seed=0)
    simulator._player.health = 0
    assert env.step(np.int64(0))[2:4] == (True, False)


def test_minatar_forgets_the_last_action_of_the_episode_before() -> None:
    fresh, used = make("minatar/breakout"), make("minatar/breakout")
    for seed in range(60):  # the first action is replaced in one of ten
        used.reset(seed=seed)
        used.step(np.int64(1))
        assert same(play(used, seed, actions=2), play(fresh, seed, actions=2))
        fresh = make("minatar/breakout")


def test_a_vector_of_them_is_played_and_kept() -> None:
    make("minatar/breakout")
    env = make_frame_vector("minatar/breakout", 3)
    (space,) = set(env.get_attr("space"))
    replay, policy = Replay(space, 1000), RandomPolicy(space.actions, np.random.default_rng(0))
    found = rollout(env, policy, 40, EnvState.reset(env, seed=0))
    replay.add_segments(found.segments, "random", seed=0)
    assert len(replay) == 120
    assert len(found.endings) == found.segments.terminated.sum() > 0


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("crafter", "crafter", "crafter"),
        ("minatar/breakout", "minatar", "minatar"),
        ("atari/Breakout", "ale_py", "atari"),
        ("minigrid/MemoryS7", "minigrid.wrappers", "minigrid"),
        ("craftax", "jax", "craftax"),
        ("craftax-classic", "jax", "craftax"),
        ("crafter", "data_prep.environments.pixels.base", "pixel"),  # stands for gymnasium, which it imports
    ],
)
def test_a_missing_package_is_one_line_that_says_what_to_install(
    name: str,
    package: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["collect", name, "--split", "train", "--steps", "1", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert error.endswith(f"is not installed: pip install 'loopwm[{extra}]'")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("minatar/pong", "minatar: game: must be one of asterix, breakout"),
        ("atari/breakout", "atari: game: must be one of "),
        ("minigrid/Nowhere", "minigrid: task: must be one of "),
        ("minigrid/MemoryS7+Nowhere", "minigrid: task: must be one of "),
        ("pong", "environment: must be one of catch"),
        ("crafter/big", "environment: must be one of catch"),
    ],
)
def test_an_unknown_game_is_one_line(name: str, message: str) -> None:
    package = {"minatar": "minatar", "atari": "ale_py", "minigrid": "minigrid"}
    if name.partition("/")[0] in package:
        pytest.importorskip(package[name.partition("/")[0]])
    with pytest.raises(InputError) as caught:
        make_frame_environment(name)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_gymnasium_finds_no_fault() -> None:
    env = make("minatar/breakout")
    importlib.import_module("gymnasium.utils.env_checker").check_env(env, skip_render_check=True)
    assert isinstance(env, gymnasium.Env)


def test_settings_are_in_name_and_version_and_unknown_ones_are_one_line() -> None:
    make("minatar/breakout")
    plain, sticky = (make_frame_environment(f"minatar/breakout{text}").space for text in ("", "@sticky=0"))
    assert (sticky.env, plain.env) == ("minatar/breakout@sticky=0", "minatar/breakout")
    assert "sticky=0 " in sticky.version
    assert "limit=1000" in sticky.version
    for text, message in (
        ("@colour=3", "unknown setting 'colour', expected one of sticky"),
        ("@sticky=2", "sticky: must be one of .*, got '2'"),
    ):
        with pytest.raises(InputError, match=message):
            make_frame_environment(f"minatar/breakout{text}")


def test_without_sticky_actions_what_happens_is_what_was_asked_and_ends_after_1000_steps() -> None:
    make("minatar/breakout")
    env = make_frame_environment("minatar/asterix@sticky=0")
    for seed in range(60):
        env.reset(seed=seed)
        steps = 0
        over = truncated = False
        while not over and not truncated:
            _, _, over, truncated, _ = env.step(np.int64(0))
            steps += 1
        assert steps <= 1000
        assert truncated == (steps == 1000 and not over)


def test_crafter_at_64_is_the_same_game_with_a_black_border() -> None:
    small, large = make("crafter"), make_frame_environment("crafter@pixels=64")
    assert (large.space.env, large.space.frame_shape) == ("crafter@pixels=64", (64, 64, 3))
    for (seen, *_), (wide, *_) in zip(play(small, 5), play(large, 5), strict=True):
        assert np.array_equal(wide[:63, :63], seen)
        assert not wide[63:].any()
        assert not wide[:, 63:].any()
    for text, message in (
        ("@pixels=32", "crafter: pixels: must be one of 63, 64, got '32'"),
        ("@size=9", "'size', expected"),
    ):
        with pytest.raises(InputError, match=message):
            make_frame_environment(f"crafter{text}")


def test_of_joined_tasks_the_seed_decides_which_is_played() -> None:
    pytest.importorskip("minigrid")
    from data_prep.environments.pixels.minigrid import MiniGrid

    one, other, both = (MiniGrid(task, 32) for task in ("MemoryS7", "MemoryS9", "MemoryS7+MemoryS9"))
    assert both.space.env == "minigrid/MemoryS7+MemoryS9@pixels=32"
    for seed in range(6):
        env = (one, other)[seed % 2]
        assert np.array_equal(both.begin(seed)[0], env.begin(seed)[0])
        for action in (0, 2, 1):
            found, expected = both.act(action), env.act(action)
            assert np.array_equal(found.frame, expected.frame)
            assert (found.reward, found.terminated) == (expected.reward, expected.terminated)


def test_small_frames_of_a_maze_tell_where_the_cue_is() -> None:
    make("minigrid/MemoryS7")
    env = make_frame_environment("minigrid/MemoryS7@pixels=32")
    assert env.space.frame_shape == (32, 32, 3)
    valid = 0
    for seed in range(60):
        _, info = env.reset(seed=seed)
        hidden = info["cue"][0] < 0
        for _ in range(2):
            frame, _, _, _, info = env.step(np.int64(0))
        row, column = info["cue"]
        assert row >= 0
        tile = frame[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        assert (tile[..., 1] > tile[..., 0].astype(int) + 30).any()  # the cue is green
        valid += hidden
    assert 0.6 < valid / 60 < 0.9
