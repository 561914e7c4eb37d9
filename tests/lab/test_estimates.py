"""Means over games of means over runs, and the paired difference of arms."""

from __future__ import annotations

import numpy as np
import pytest

from eval.scores.intervals import RESAMPLES, SEED, game_interval95
from lab.estimates import interval95, over_runs

WON = [
    {"won": {"cloned": [0.0, 100.0, 0.0, 100.0], "imagined": [100.0, 100.0, 0.0, 0.0]}},
    {"won": {"cloned": [0.0, 0.0, 0.0, 100.0], "imagined": [100.0, 100.0, 100.0, 100.0]}},
]


def test_over_runs_resamples_games_of_the_mean_over_runs() -> None:
    results = over_runs(WON)
    cloned, imagined = np.array([0.0, 50.0, 0.0, 100.0]), np.array([100.0, 100.0, 50.0, 50.0])
    assert results["arms"]["cloned"]["won"]["mean"] == cloned.mean()
    assert results["arms"]["imagined"]["won"]["mean"] == imagined.mean()
    counts = np.random.default_rng(SEED).multinomial(4, [0.25] * 4, size=RESAMPLES)
    gains = [np.repeat(imagined - cloned, count).mean() for count in counts]
    assert results["difference"]["won"]["mean"] == pytest.approx(np.mean(imagined - cloned))
    assert results["difference"]["won"]["ci95"] == pytest.approx(np.percentile(gains, [2.5, 97.5]))


def test_interval_of_one_value_a_game_is_that_of_games() -> None:
    values = np.array([[0.0], [1.0]] * 200)
    np.testing.assert_allclose(interval95(values), game_interval95(values, range(400)))


def test_over_runs_of_one_run_is_its_own_mean() -> None:
    assert over_runs(WON[:1])["difference"]["won"]["mean"] == 0.0
