"""Steps lost in restarts are bounded, whatever became of unanswered ones."""

from __future__ import annotations

import pytest

pytest.importorskip("httpx")

from lab.benchmarks.serve_restarts import lost_steps


@pytest.mark.parametrize(
    ("unanswered", "kept", "bounds"),
    [(0, 5, (0, 0)), (0, 4, (1, 1)), (1, 6, (0, 0)), (1, 5, (0, 1)), (1, 4, (1, 2)), (9, 0, (5, 5))],
)
def test_lost_steps_are_not_hidden_by_unanswered_ones(unanswered: int, kept: int, bounds: tuple[int, int]) -> None:
    assert lost_steps({"a": 5}, {"a": unanswered}, {"a": kept}) == bounds
