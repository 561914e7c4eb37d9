"""Rows printed in the paper, and comparisons with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from loopwm.records.files import read_json

OURS = {"em": "em", "f1": "f1", "bleu4": "bleu4", "entity": "entity_recall"}
"""Metrics of the paper and ours with the same meaning."""


@dataclass(frozen=True)
class Printed:
    """Row of the paper in percent by metric, and the table that prints it."""

    figures: Mapping[str, float]
    table: str


@cache
def paper_rows() -> dict[str, Any]:
    """Read `paper_rows.json`: the paper's printed rows in percent."""
    rows: dict[str, Any] = read_json(Path(__file__).with_name("paper_rows.json"))
    return rows


def environment_beside(suite: str) -> str | None:
    """Return the environment whose printed rows are comparable with a suite, or None.

    The paper's windows are of expert paths, in a mix of families that a suite must share.
    """
    environment: str | None = paper_rows()["suites"].get(suite)
    return environment


def systems(environment: str) -> list[str]:
    """Return the systems of the paper, its own first."""
    return list(paper_rows()["tables"][environment])


def printed(environment: str, system: str, horizon: int, family: str) -> list[Printed]:
    """Return the printed rows of a cell: none, one, or two that disagree (the main table and the steps')."""
    rows = paper_rows()
    steps = rows["by_horizon"].get(environment, {}).get(system, {}).get(str(horizon), {})
    main = rows["tables"][environment][system] if horizon == rows["horizon"] else {}
    matches = [Printed(main[family], "main table")] if family in main else []
    if family in steps and steps[family] != main.get(family):
        matches.append(Printed(steps[family], "table of steps"))
    return matches


def relative_change(ours: float, baseline: float) -> float | None:
    """Return (ours - baseline) / baseline in percent (LoopWM, table 5): 0 if both are 0, None if only the baseline is.

    The rule stands under each of its tables of relative improvements; it prints None as `---`.
    """
    if baseline == 0:
        return 0.0 if ours == 0 else None
    return 100 * (ours - baseline) / baseline


def paper_cell(row: Mapping[str, float]) -> str:
    return " / ".join(f"{row[name]:.1f}" for name in OURS)
