"""The rows the paper prints, and how it compares with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from eval.scores.entities import DATA
from eval.scores.metrics import METRICS
from loopwm.records.files import read_json

OURS = {metric.paper: name for name, metric in METRICS.items() if metric.paper}
"""The paper's four metrics and the names of ours beside them."""


@dataclass(frozen=True)
class Printed:
    """A row of the paper in percent by metric, and which of its tables prints it."""

    figures: Mapping[str, float]
    table: str


@cache
def paper_rows() -> dict[str, Any]:
    """`eval/data/paper_rows.json`: the paper's printed rows in percent."""
    rows: dict[str, Any] = read_json(DATA / "paper_rows.json")
    return rows


def environment_beside(suite: str) -> str | None:
    """The environment whose printed rows stand beside a suite's. None where they do not: the paper's windows are of an
    expert's path, in a mix of families that a suite has to share."""
    environment: str | None = paper_rows()["suites"].get(suite)
    return environment


def systems(environment: str) -> list[str]:
    """The systems the paper prints, its own first."""
    return list(paper_rows()["tables"][environment])


def printed(environment: str, system: str, horizon: int, family: str) -> list[Printed]:
    """What the paper prints for this cell: nothing, one row, or two that disagree (its main table and the steps')."""
    rows = paper_rows()
    steps = rows["by_horizon"].get(environment, {}).get(system, {}).get(str(horizon), {})
    main = rows["tables"][environment][system] if horizon == rows["horizon"] else {}
    found = [Printed(main[family], "main table")] if family in main else []
    if family in steps and steps[family] != main.get(family):
        found.append(Printed(steps[family], "table of steps"))
    return found


def relative_change(ours: float, baseline: float) -> float | None:
    """(ours - baseline) / baseline in percent (LoopWM, table 5): 0 where both are 0, None where only the baseline is.

    The rule stands under each of its tables of relative improvements; it prints None as `---`.
    """
    if baseline == 0:
        return 0.0 if ours == 0 else None
    return 100 * (ours - baseline) / baseline
