"""Catch is bsuite's: a ball falls, a paddle moves, the last frame pays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from data_prep.environments.pixels.by_name import make_frame_environment
from data_prep.environments.pixels.catch import COLUMNS, ROWS, Catch
from loopwm.records.errors import InputError


def ball_of(game: Catch, frame: np.ndarray, row: int) -> int:
    return int(frame[row, :, 0].argmax())


def begun_over(column: int) -> Catch:
    """A game whose ball begins in a column."""
    for seed in range(100):
        game = Catch()
        if ball_of(game, game.begin(seed)[0], 0) == column:
            return game
    raise AssertionError(f"no seed puts the ball into column {column}")


@pytest.mark.parametrize(("column", "offset"), list(itertools.product(range(COLUMNS), (-2, -1, 0, 1, 2))))
def test_the_ball_falls_a_row_an_action_and_the_paddle_is_paid_at_the_end(column: int, offset: int) -> None:
    game = begun_over(column)
    moves = [1 + int(np.sign(offset))] * abs(offset) + [1] * (ROWS - 1 - abs(offset))
    for row, action in enumerate(moves, start=1):
        outcome = game.act(action)
        paddle = COLUMNS // 2 + int(np.sign(offset)) * min(row, abs(offset))
        expected = np.zeros((ROWS, COLUMNS, 1), np.uint8)
        expected[row, column] = expected[ROWS - 1, paddle] = 255
        assert np.array_equal(outcome.frame, expected)
        assert (outcome.terminated, outcome.truncated) == (row == ROWS - 1, False)
        caught = 1.0 if paddle == column else -1.0
        assert outcome.reward == (caught if outcome.terminated else 0.0)


def test_the_paddle_stays_on_the_board() -> None:
    for action, column in ((0, 0), (2, COLUMNS - 1)):
        game = begun_over(2)
        frames = [game.act(action).frame for _ in range(5)]
        assert ball_of(game, frames[-1], ROWS - 1) == column


def test_the_ball_begins_in_every_column_alike() -> None:
    game = Catch()
    columns = [ball_of(game, game.begin(seed)[0], 0) for seed in range(1000)]
    assert np.bincount(columns).min() > 150


def test_the_drifting_ball_moves_aside_in_three_steps_of_ten() -> None:
    game, moves = Catch("catch-drift", 0.3), []
    for seed in range(2000):
        start = ball_of(game, game.begin(seed)[0], 0)
        if start == 2:
            moves.append(ball_of(game, game.act(1).frame, 1) - start)
    shares = [moves.count(move) / len(moves) for move in (-1, 0, 1)]
    assert np.allclose(shares, (0.15, 0.7, 0.15), atol=0.05)


def test_both_games_are_told_apart_and_an_action_outside_is_refused() -> None:
    catch, drift = make_frame_environment("catch"), make_frame_environment("catch-drift")
    with pytest.raises(InputError, match="env is 'catch-drift', expected 'catch'"):
        catch.space.require(drift.space, "replay")
    catch.reset(seed=0)
    with pytest.raises(InputError, match="must be below 3 for catch"):
        catch.step(np.int64(3))
