"""The true chances of the drifting ball are those of the simulator, and what departs from them is told."""

from __future__ import annotations

import numpy as np
import pytest

from data_prep.environments.pixels.catch import Catch
from lab.pixels.calibration import AGES, DRIFT, SPACE, ball_columns, compare, first_frame, true_chances


def simulated(start: int, count: int) -> dict[int, list[int]]:
    game, columns = Catch("catch-drift", DRIFT), {age: [] for age in AGES}
    seed = 0
    while len(columns[AGES[-1]]) < count:
        frame, _ = game.begin(seed)
        seed += 1
        if np.array_equal(frame, first_frame(start)):
            for age in range(1, max(AGES) + 1):
                frame = game.act(1).frame
                if age in AGES:
                    columns[age] += ball_columns(frame[None], age).tolist()
    return columns


@pytest.mark.parametrize("start", [0, 2])
def test_chances_are_those_of_the_simulator(start: int) -> None:
    assert Catch("catch-drift", DRIFT).space == SPACE
    for age, columns in simulated(start, 1500).items():
        assert compare(np.array(columns), true_chances(start, age))["p"] > 0.01


def test_a_world_without_chance_and_one_that_breaks_the_rules_are_found_out() -> None:
    chances = true_chances(2, 1)
    assert chances.tolist() == pytest.approx([0, 0.15, 0.7, 0.15, 0])
    assert compare(np.full(300, 2), chances)["p"] < 1e-6
    assert compare(np.array([2] * 200 + [0] * 3), chances)["p"] == 0.0
    told = compare(np.array([1] * 15 + [2] * 70 + [3] * 15 + [-1] * 4), chances)
    assert told["p"] == pytest.approx(1.0)
    assert told["unclear"] == 4


def test_a_row_with_two_balls_or_none_is_unclear() -> None:
    frames = np.stack([first_frame(1), first_frame(1) * 0, first_frame(1) + first_frame(3)])
    assert ball_columns(frames, 0).tolist() == [1, -1, -1]
