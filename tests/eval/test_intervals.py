"""Intervals against slow references: games drawn one by one, Wilson's interval of scipy, the jackknife."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binomtest

from eval.scores.intervals import (
    RESAMPLES,
    SEED,
    fraction_interval95,
    game_interval95,
    game_standard_errors,
)

Values = NDArray[np.float64]


def some_windows() -> tuple[Values, list[str]]:
    """Windows of 25 games, 1 to 6 each, alike within a game."""
    rng = np.random.default_rng(3)
    games = [f"game {g:02}" for g in range(25) for _ in range(1 + g % 6)]
    base = {game: rng.random(2) for game in games}
    values = np.array([(rng.random(2) < base[game]).astype(float) for game in games])
    return values, games


def drawn_one_by_one(values: Values, games: list[str]) -> Values:
    """The same draws, window by window: each resample is a list of all windows of the games drawn."""
    names = sorted(set(games))
    rng = np.random.default_rng(SEED)
    counts = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=RESAMPLES)
    means = []
    for drawn in counts:
        rows = []
        for name, times in zip(names, drawn, strict=True):
            for _ in range(times):
                rows += [values[i] for i, game in enumerate(games) if game == name]
        means.append(np.mean(rows, axis=0))
    return np.array([[np.percentile(column, q) for column in np.transpose(means)] for q in (2.5, 97.5)])


def test_games_are_drawn_with_all_their_windows() -> None:
    values, games = some_windows()
    np.testing.assert_allclose(game_interval95(values, games), drawn_one_by_one(values, games), atol=1e-12)


def test_the_order_of_the_windows_does_not_matter() -> None:
    values, games = some_windows()
    order = np.random.default_rng(0).permutation(len(games))
    shuffled = game_interval95(values[order], [games[i] for i in order])
    np.testing.assert_allclose(shuffled, game_interval95(values, games), atol=1e-12)


def test_windows_that_are_copies_of_one_another_make_no_interval_narrower() -> None:
    values, games = some_windows()
    repeated = np.repeat(values, 4, axis=0)
    copied = game_interval95(repeated, [game for game in games for _ in range(4)])
    np.testing.assert_allclose(copied, game_interval95(values, games), atol=1e-12)
    alone = game_interval95(repeated, range(len(repeated)))
    assert ((alone[1] - alone[0]) < 0.6 * (copied[1] - copied[0])).all()


def test_with_one_window_a_game_the_interval_has_the_normal_width() -> None:
    values = np.array([[0.0], [1.0]] * 200)
    low, high = game_interval95(values, range(400))[:, 0]
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.006)
    assert high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.006)


@pytest.mark.parametrize("n", [1, 2, 7, 50])
@pytest.mark.parametrize("right", [0.0, 1.0])
def test_none_or_all_right_have_wilsons_interval_of_as_many_games(n: int, right: float) -> None:
    games = [f"g{i % n}" for i in range(3 * n)]
    found = fraction_interval95(np.full((3 * n, 1), right), games)[:, 0]
    expected = binomtest(round(right * n), n).proportion_ci(method="wilson")
    np.testing.assert_allclose(found, [expected.low, expected.high], atol=1e-9)


def test_one_game_that_is_partly_right_has_no_interval() -> None:
    assert all(math.isnan(bound) for bound in fraction_interval95(np.array([[0.0], [1.0]]), ["g", "g"])[:, 0])


def test_columns_are_judged_each_by_itself() -> None:
    values, games = some_windows()
    both = fraction_interval95(np.column_stack([values[:, 0], np.zeros(len(values))]), games)
    np.testing.assert_array_equal(both[:, 0], game_interval95(values, games)[:, 0])
    assert both[0, 1] == 0 < both[1, 1]


def test_standard_errors_are_plain_for_single_windows_and_near_the_jackknife_for_games() -> None:
    values, games = some_windows()
    alone = game_standard_errors(values, range(len(values)))
    assert alone is not None
    np.testing.assert_allclose(alone, values.std(axis=0, ddof=1) / len(values) ** 0.5)
    left_out = np.array([values[[g != game for g in games]].mean(axis=0) for game in sorted(set(games))])
    n = len(left_out)
    jackknife = np.sqrt((n - 1) / n * ((left_out - left_out.mean(axis=0)) ** 2).sum(axis=0))
    found = game_standard_errors(values, games)
    assert found is not None
    np.testing.assert_allclose(found, jackknife, rtol=0.05)
    assert (found > 1.2 * alone).all()
    assert game_standard_errors(values[:2], ["g", "g"]) is None
