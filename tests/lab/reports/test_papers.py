"""The paper's rows and its rule of comparison."""

from __future__ import annotations

from itertools import product

import pytest

from lab.reports import papers

FAMILIES = ("Boil", "Chemistry", "Conductivity", "Find", "Freeze", "Genetics", "Grow", "Incline", "Melt", "Power")


@pytest.mark.parametrize(
    ("ours", "baseline", "change"),
    [(68.4, 32.0, 113.75), (0.0, 12.5, -100.0), (25.0, 0.0, None), (0.0, 0.0, 0.0), (5.0, 5.0, 0.0)],
)
def test_relative_change_is_the_papers_rule(ours: float, baseline: float, change: float | None) -> None:
    assert papers.relative_change(ours, baseline) == (None if change is None else pytest.approx(change))


def test_the_rule_gives_the_papers_own_relative_changes() -> None:
    """Within what rounding to a tenth can do; nine of 440 printed cells are the paper's own slips."""
    rows = papers.paper_rows()
    steps = rows["by_horizon"]["scienceworld"]
    changes = rows["relative_improvement_of_LoopWM"]["scienceworld"]
    slips = 0
    for peer, k, family, metric in product(changes, "12345", (*FAMILIES, "overall"), papers.OURS):
        ours, baseline = steps["LoopWM"][k][family][metric], steps[peer][k][family][metric]
        printed, found = changes[peer][k][family][metric], papers.relative_change(ours, baseline)
        if printed is None or found is None:
            slips += printed is not found
        else:
            rounding = 6 * (1 + ours / baseline) / baseline if baseline else 0
            slips += abs(printed - found) > max(0.6, rounding)
    assert slips == 9


def test_both_values_of_a_cell_are_given_where_the_paper_prints_two() -> None:
    both = papers.printed("scienceworld", "qwen-3.5-flash", 5, "overall")
    assert [(row.figures["em"], row.table) for row in both] == [(10.0, "main table"), (33.4, "table of steps")]
    assert [row.figures["em"] for row in papers.printed("scienceworld", "LoopWM", 5, "overall")] == [68.4]
    assert [row.table for row in papers.printed("scienceworld", "LoopWM", 4, "Melt")] == ["table of steps"]
    assert papers.printed("alfworld", "LoopWM", 4, "pick") == []
