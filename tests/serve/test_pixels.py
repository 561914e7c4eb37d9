"""A game and its imagined world side by side, by scripted keys."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loopwm.__main__ import main
from loopwm.pixel.checkpoint import load_checkpoint
from loopwm.pixel.gym import CATCH, real_environment
from loopwm.records.errors import InputError
from loopwm.records.files import PACKAGED
from loopwm.records.frames import FrameSpace, episode_files, read_episode
from serve.pixels.game import TOLERANCE, Game, differing
from serve.pixels.pictures import GAP, OUTLINE, half_blocks, picture
from serve.pixels.play import Keyboard, open_game

SEED = 3


@pytest.fixture
def world() -> Any:
    return load_checkpoint(CATCH).world()


@pytest.fixture
def game(world: Any) -> Game:
    return Game(world, real_environment("catch"), [], SEED)


def play(*arguments: str) -> int:
    return main(["play", "--pixels", *arguments])


def test_scripted_keys_show_a_line_for_each(capsys):
    assert play("--keys", "02 1", "--seed", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines[:-1]] == [f"step {step}" for step in range(4)]
    assert all(re.search(r"cells that differ: \d+, diverged: \d of \d steps$", line) for line in lines[:-1])
    assert re.fullmatch(r"1 episodes, diverged: \d of 3 steps", lines[-1])


def test_same_actions_reach_both_sides(game):
    paddle = 2
    for action, move in ((0, -1), (0, -1), (0, 0), (2, 1), (1, 0)):
        game.act(action)
        paddle += move
        assert [int(view.frame[-1, :, 0].argmax()) for view in game.now.sides.values()] == [paddle, paddle]


def test_step_counts_as_diverged_when_sides_differ(game, monkeypatch):
    game.act(1)
    assert (game.steps, game.diverged) == (1, 0)
    show = game._world.show
    monkeypatch.setattr(game._world, "show", lambda state: show(state).roll(1, 2))
    game.act(1)
    assert (game.steps, game.diverged) == (2, 1)
    assert game.now.cells.sum() == 4  # ball and paddle, at their real and their imagined places


def test_end_of_one_side_only_counts_as_diverged(game, monkeypatch):
    real_step = game._env.step
    monkeypatch.setattr(game._env, "step", lambda action: (*real_step(action)[:2], True, False, {}))
    game.act(1)
    assert not game.now.cells.any()
    assert game.diverged == 1


def imagine(game: Game, monkeypatch: pytest.MonkeyPatch, reward: float, terminated: bool) -> None:
    """Every imagined step has this reward and end."""
    step = game._world.step

    def changed(*arguments: Any) -> Any:
        return replace(step(*arguments), reward=torch.tensor([reward]), terminated=torch.tensor([terminated]))

    monkeypatch.setattr(game._world, "step", changed)


def test_rewards_of_each_side_add_up(game, monkeypatch):
    real_step = game._env.step
    monkeypatch.setattr(game._env, "step", lambda action: (real_step(action)[0], 0.5, False, False, {}))
    imagine(game, monkeypatch, reward=0.25, terminated=False)
    for _ in range(3):
        game.act(1)
    assert (game.now.real.score, game.now.imagined.score) == (1.5, 0.75)


def test_imagined_side_stays_over(game, monkeypatch):
    imagine(game, monkeypatch, reward=0.25, terminated=True)
    game.act(1)
    over = game.now.imagined
    game.act(0)
    assert over.over
    assert game.now.imagined is over
    assert game.age == 2


def test_cells_differ_from_the_tolerance_on():
    real = np.zeros((16, 16, 3), np.uint8)
    imagined = real.copy()
    imagined[2, 3], imagined[4, 5] = TOLERANCE, TOLERANCE - 1
    assert np.argwhere(differing(real, imagined)).tolist() == [[2, 3]]


def test_back_replays_the_simulator(game):
    frames = []
    for action in (0, 2, 2):
        game.act(action)
        frames.append(game.now.real.frame)
    game.back()
    assert np.array_equal(game.now.real.frame, frames[1])
    game.act(2)
    assert np.array_equal(game.now.real.frame, frames[2])
    for _ in range(5):
        game.back()
    assert game.age == 0


@pytest.mark.parametrize("steps", [0, 3, 8])
def test_fork_starts_the_imagined_world_from_real_frames(steps, game, monkeypatch):
    actions = [step % 3 for step in range(steps)]
    for action in actions:
        game.act(action)
    start, contexts = game._world.start, []

    def recorded(*context: Any) -> Any:
        contexts.append(context)
        return start(*context)

    monkeypatch.setattr(game._world, "start", recorded)
    game.fork()
    ((obs, action, first, _),) = contexts
    frames = min(steps + 1, 8)
    assert np.array_equal(obs[0, -1], game.now.real.frame)
    assert (obs.shape[1], action.tolist()) == (frames, [actions[steps + 1 - frames :]])
    assert first.tolist() == [[frames == steps + 1] + [False] * (frames - 1)]
    assert not game.now.cells.any()
    assert game.age == steps


def test_steps_that_can_be_taken_back_are_bounded(game, monkeypatch):
    monkeypatch.setattr("serve.pixels.game.HISTORY", 3)
    game.restart()
    for _ in range(6):
        game.act(0)
    for _ in range(6):
        game.back()
    assert game.age == 3
    game.act(0)
    assert game.now.real.frame[4].any()


def test_action_after_an_end_begins_the_next_episode(game):
    for _ in range(9):
        game.act(1)
    assert game.now.real.over
    assert abs(game.now.real.score) == 1
    game.act(1)
    assert (game.age, game.episodes, game.now.real.score) == (0, 2, 0)


def test_world_without_simulator_plays_alone(world):
    starts = [read_episode(path) for path in episode_files(CATCH / "starts")]
    game = Game(world, None, starts, SEED)
    for _ in range(20):
        game.act_randomly()
    assert list(game.now.sides) == ["imagined"]
    assert (game.steps, game.episodes, game.diverged) == (18, 3, 0)
    game.fork()
    assert picture(game.now, 2).shape[1] == 2 * 5 + 2 * GAP


def test_cells_of_large_frames_hold_several_pixels():
    real = np.zeros((64, 63, 3), np.uint8)
    imagined = real.copy()
    imagined[4:8, 60:63, 1] = 255
    imagined[20, 20] = 255  # one of sixteen pixels, below the tolerance
    assert np.argwhere(differing(real, imagined)).tolist() == [[1, 15]]
    assert np.argwhere(differing(imagined, real)).tolist() == [[1, 15]]


def test_picture_outlines_cells_that_differ(game):
    assert not (picture(game.now, 8) == OUTLINE).all(2).any()
    game.now.imagined.frame[4, 2] = 255
    outlined = (picture(game.now, 8) == OUTLINE).all(2)
    assert outlined.sum() == 2 * 28  # the border of a cell of 8 x 8, on both sides
    assert outlined[4 + 32, 4 + 16 : 4 + 24].all()


def test_half_blocks_are_the_pixels_of_the_image():
    image = np.arange(3 * 2 * 3, dtype=np.uint8).reshape(3, 2, 3)
    lines = half_blocks(image, 80, 24)
    assert lines[0].startswith("\x1b[38;2;0;1;2;48;2;6;7;8m▀\x1b[38;2;3;4;5;48;2;9;10;11m▀")
    assert len(lines) == 2
    assert [line.count("▀") for line in half_blocks(np.zeros((100, 200, 3), np.uint8), 80, 24)] == [67] * 17


def test_arrows_are_the_directions_of_the_game(game):
    keyboard = Keyboard(game._world.space)
    for key in ("LEFT", "LEFT", "RIGHT", "DOWN"):
        command = keyboard.command(key)
        assert command is not None
        command(game)
    assert int(game.now.real.frame[-1, :, 0].argmax()) == 1
    assert keyboard.command("UP") is None
    minatar = Keyboard(FrameSpace("minatar/freeway", "", (10, 10, 7), 3))
    assert minatar.command("UP") is not None
    assert minatar.command("LEFT") is None


@pytest.mark.parametrize(
    ("typed", "commands"), [(b"\x1b[3~\x1b[H\x1bOP\x1b[15~\x1b[1;5C\x1b[[A0\x1b[C", 2), (b"0\x1b", 1), (b"\x1b", 0)]
)
def test_keys_without_a_meaning_do_nothing_and_escape_quits(game, monkeypatch, typed, commands):
    ours, theirs = os.pipe()
    os.write(theirs, typed)
    os.close(theirs)
    with os.fdopen(ours) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        assert len(list(Keyboard(game._world.space).typed(15))) == commands


def test_letters_are_actions_where_there_are_enough():
    keyboard = Keyboard(FrameSpace("crafter", "", (63, 63, 3), 17))
    back, *others = keyboard.script("B b\ng")
    assert back is Game.back
    assert len(others) == 2
    assert Game.back not in others
    with pytest.raises(InputError, match=r"--keys: must be of 0 to g, .*got 'h'"):
        list(keyboard.script("h"))


def test_gif_shows_every_frame(tmp_path):
    image = pytest.importorskip("PIL.Image")
    assert play("--keys", "0" * 9 + "N12", "--gif", str(tmp_path / "a.gif"), "--fps", "5") == 0
    with image.open(tmp_path / "a.gif") as gif:
        assert gif.n_frames == 13
        assert gif.info["duration"] == 200


def test_keys_of_a_terminal_are_drawn(tmp_path):
    """Play in a pseudo-terminal: keys, an arrow, the agent, and quit."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "serve", "play", "--pixels", "--fps", "50"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        text = b""
        for keys, awaited in (("", b"quit"), ("0\x1b[C", b"step 2\x1b"), ("A", b"step 4\x1b"), ("Q", b"episodes")):
            os.write(ours, keys.encode())
            while awaited not in text:
                text += os.read(ours, 65536)
        assert process.wait() == 0
    os.close(ours)
    assert "▀".encode() in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keys", "0x"], r"--keys: must be of 0 to 2, A, B, F, N, \., got 'x'"),
        (["--model", str(PACKAGED)], r".*: .*system.*"),
        (["--model", "/nowhere"], r"/nowhere/config.json: no such file"),
        (["--gif", "/nowhere/a.gif"], r"--gif: /nowhere: no such folder"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys):
    assert play(*(() if "--keys" in arguments else ("--keys", "0")), *arguments) == 2
    errors = capsys.readouterr().err
    assert re.fullmatch(f"error: {message}\n", errors)


@pytest.fixture
def unknown(tmp_path) -> Path:
    """A checkpoint of a game whose simulator is not installed."""
    folder = tmp_path / "model"
    shutil.copytree(CATCH, folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"env": "catch"', '"env": "no-such-game"'))
    return folder


def test_no_simulator_and_no_starts_is_one_line(unknown, capsys):
    shutil.rmtree(unknown / "starts")
    assert play("--keys", "0", "--model", str(unknown)) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "got 'no-such-game'; without it --starts is needed: " in errors


def test_starts_of_another_game_are_one_line(unknown, capsys):
    assert play("--keys", "0", "--model", str(unknown)) == 2
    assert "env is 'catch', expected 'no-such-game'" in capsys.readouterr().err


def test_simulator_of_another_version_plays_alone(capsys, monkeypatch):
    monkeypatch.setattr("data_prep.environments.pixels.catch.RULES", "2")
    assert play("--keys", "0") == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("the imagined world alone: simulator of catch: version is '2 drift=0', expected")
    assert "real" not in captured.out


def test_packaged_maze_is_remembered_while_nothing_of_it_is_seen():
    pytest.importorskip("minigrid")

    def agreement(context: int) -> float:
        """Share of cells that agree when the agent turns back, from a world that starts again from so many frames."""
        game, _, missing = open_game(CATCH.parent / "memory", seed=0)
        assert missing == ""
        assert game._world.context == 96
        game._world.context = context
        for action in [0] * 4 + [6] * 12 + [0] * 2:
            game.act(action)
        game.fork()
        for _ in range(2):
            game.act(0)
        return float(1 - game.now.cells.mean())

    assert agreement(96) > 0.98
    assert agreement(1) < 0.8


@pytest.mark.parametrize(("option", "value"), [("--fps", "0"), ("--seed", "-1")])
def test_numbers_out_of_range_are_refused_by_name(option, value, capsys):
    with pytest.raises(SystemExit) as ended:
        play("--keys", "0", f"{option}={value}")
    assert ended.value.code == 2
    assert f"argument {option}: must be a " in capsys.readouterr().err
