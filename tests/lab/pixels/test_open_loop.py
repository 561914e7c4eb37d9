"""Imagined rollouts from recorded play, against what was recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lab.pixels.open_loop import agreeing_cells, lit_pixels, means, open_loop_rollouts, whole
from loopwm.pixel.imagined import EnvState, Imagined, RandomPolicy, rollout
from loopwm.pixel.replay import Replay
from serve.pixels.game import differing
from tests.fixtures.blocks import COLUMNS, MOVES, PATCH, ROWS, SPACE, drawn
from tests.pixel.agents.test_agent_trainer import blocks

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TrueWorld:
    """The blocks as they are; `blind` worlds end by chance and show nothing, `endless` ones go on."""

    blind: bool = False
    endless: bool = False
    space = SPACE

    def start(self, obs: Tensor, action: Tensor, first: Tensor, generator: torch.Generator) -> Tensor:
        corners = obs[:, -1, ::PATCH, ::PATCH, 0].flatten(1)
        shown = corners == 200
        at = torch.where(shown.any(1), shown.long().argmax(1), 2 * COLUMNS + 3)  # else the other block hides it
        return torch.stack((at // COLUMNS, at % COLUMNS), 1)

    def step(self, state: Tensor, action: Tensor, generator: torch.Generator) -> Imagined[Tensor]:
        state = (state + torch.tensor(MOVES)[action]) % torch.tensor((ROWS, COLUMNS))
        there = (state == 0).all(1)
        if self.blind:
            there = torch.rand(len(state), generator=generator) < 0.5
        if self.endless:
            there = torch.zeros_like(there)
        return Imagined(there.float(), there, state)

    def replace(self, state: Tensor, rows: Tensor, fresh: Tensor) -> Tensor:
        return state.index_copy(0, rows, fresh)

    def show(self, state: Tensor) -> Tensor:
        frames = np.stack([drawn(place, (2, 3)) for place in state.numpy()])
        return torch.from_numpy(frames * (not self.blind))


@pytest.fixture(scope="module")
def play() -> Replay:
    replay, env = Replay(SPACE, 10_000), blocks(8)
    policy = RandomPolicy(SPACE.actions, np.random.default_rng(0))
    replay.add_segments(rollout(env, policy, 200, EnvState.reset(env, 0)).segments, "random", 0)
    return replay


def look(world: TrueWorld, play: Replay) -> Any:
    made: Any = world
    return open_loop_rollouts(made, play, 256, 3, 6, np.random.default_rng(0), CPU)


def test_the_true_world_is_trusted_and_a_blind_one_is_not(play: Replay) -> None:
    true, blind = (look(TrueWorld(blind), play).overall() for blind in (False, True))
    assert true["objects"] == 1.0
    assert true["reward_real"] == pytest.approx(true["reward_imagined"], abs=0.02)
    assert true["ends"] < 0.2
    assert blind["objects"] == 0.0
    assert blind["ends"] > 1.0


def test_what_lies_behind_the_first_end_does_not_count(play: Replay) -> None:
    found = look(TrueWorld(), play)
    for end, valid in zip(found.imagined["end"], found.imagined["valid"], strict=True):
        expected = len(end) if not end.any() else int(end.argmax()) + 1
        assert valid.tolist() == [t < expected for t in range(len(end))]
    assert not found.real["valid"][:, 1:][found.real["end"][:, :-1]].any()
    real, imagined = (means(part, "reward", 0) for part in (found.real, found.imagined))
    assert real.shape == imagined.shape == (6,)
    valid = found.real["valid"][:, 3]
    assert real[3] == pytest.approx(found.real["reward"][valid, 3].mean())


def test_cells_after_a_real_end_do_not_count(play: Replay) -> None:
    found = look(TrueWorld(endless=True), play)
    cells, valid = found.imagined["cells"], found.real["valid"]
    assert found.imagined["valid"].all()
    assert not valid.all()
    assert means(found.imagined, "cells") == pytest.approx(cells[valid].mean())
    assert cells[valid].mean() > cells.mean()


def test_frames_with_two_balls_or_none_are_not_whole() -> None:
    real = np.zeros((4, 3, 3, 2), np.uint8)
    real[np.arange(4), np.arange(4) % 3, 1, 0] = 255  # one ball
    real[2:, 0, 0, 1] = 255  # sometimes a paddle
    imagined = np.zeros((1, 4, 3, 3, 2), np.uint8)
    imagined[0, 0, 2, 2, 0] = 255
    imagined[0, 1, 2, :2, 0] = 255
    imagined[0, 3, 2, 2, 0] = imagined[0, 3, :2, 0, 1] = 255
    assert lit_pixels(imagined)[0].tolist() == [[1, 0], [2, 0], [0, 0], [1, 2]]
    assert whole(imagined, real)[0].tolist() == [True, False, False, False]


def test_cells_agree_as_the_game_says() -> None:
    rng = np.random.default_rng(0)
    real = rng.integers(0, 256, (2, 3, 33, 20, 3), dtype=np.uint8)
    frames = np.clip(real + rng.integers(-42, 43, real.shape), 0, 255).astype(np.uint8)
    expected = [[1 - differing(real[b, t], frames[b, t]).mean() for t in range(3)] for b in range(2)]
    np.testing.assert_allclose(agreeing_cells(frames, real), expected)
    assert 0.1 < np.mean(expected) < 0.9
