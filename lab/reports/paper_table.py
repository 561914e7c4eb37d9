"""Comparison of runs with the rows printed in the paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval.scores.metrics import HEADLINE, METRICS
from eval.scores.rows import OVERALL
from eval.scores.tables import four_cell, percent
from lab.reports import papers, run_plots
from lab.reports.analysis import Share
from lab.reports.blocks import Block, Fold, Table, Text
from lab.reports.groups import Group
from lab.reports.papers import OURS, paper_cell
from lab.reports.run_plots import Line
from lab.reports.runs import Run

PAPER = (
    "The paper's windows and metric definitions are not published: its rows stand here for orientation and are not "
    "measured on the same windows. Relative change is the paper's rule, (ours - its row) / its row; --- where its "
    "row is 0 and ours is not. Where the paper prints two values for a cell, in its main table and in its table of "
    "steps, both stand here."
)


def paper_lines(group: Group, metric: str) -> list[Line]:
    """Return the lines of the paper's model, if it prints every horizon."""
    environment = papers.environment_beside(group.suite)
    if environment is None:
        return []
    name = next(paper for paper, ours in OURS.items() if ours == metric)
    rows = [papers.printed(environment, "LoopWM", k, OVERALL) for k in group.horizons]
    values = [rows[0].figures[name] / 100 if rows else None for rows in rows]
    means = [None if value is None else Share(value, value, value, 0) for value in values]
    return [Line("paper: LoopWM", run_plots.PAPER, means)]


def paper(group: Group) -> list[Block]:
    environment = papers.environment_beside(group.suite)
    if environment is None:
        return []
    horizon = papers.paper_rows()["horizon"]
    blocks: list[Block] = [Text(PAPER)]
    overall = {k: _paper_overall(group, environment, k) for k in group.horizons if _is_printed(environment, k)}
    blocks += [overall.pop(k) for k in [horizon] if k in overall]
    if overall:
        blocks.append(Fold("Other horizons", list(overall.values())))
    for name, run in zip(group.names, group.runs, strict=True):
        horizons = run.horizons if run is group.reference else [k for k in run.horizons if k == horizon]
        tables = [_paper_families(run, environment, k) for k in horizons if _is_printed(environment, k)]
        if tables:
            blocks.append(Fold(f"{name}: by family", tables))
    return blocks


def _is_printed(environment: str, horizon: int) -> bool:
    return any(papers.printed(environment, system, horizon, OVERALL) for system in papers.systems(environment))


def _paper_overall(group: Group, environment: str, horizon: int) -> Table:
    """Render the runs, then the paper's rows with the reference run's relative change against each."""
    rows = []
    for name, run in zip(group.names, group.runs, strict=True):
        if (row := run.row(OVERALL, horizon)) is not None:
            rows.append([name, *(percent(row.get(metric)) for metric in HEADLINE), ""])
    ours = group.reference.row(OVERALL, horizon)
    for system in papers.systems(environment):
        for printed in papers.printed(environment, system, horizon, OVERALL):
            figures = [f"{printed.figures[metric]:.1f}" for metric in OURS]
            rows.append([f"paper: {system} ({printed.table})", *figures, _relative(ours, printed.figures)])
    header = ["Overall", *(METRICS[metric].title for metric in HEADLINE), f"{group.reference_name} against this row, %"]
    return Table(header, rows, f"Horizon {horizon}.")


def _paper_families(run: Run, environment: str, horizon: int) -> Table:
    systems = papers.systems(environment)
    printed = [s for s in systems if papers.printed(environment, s, horizon, OVERALL)]
    rows = []
    for row in run.rows:
        if row["horizon"] == horizon:
            cells = [_paper_cell(row, environment, system, horizon) for system in printed]
            rows.append([row["family"], str(row["n"]), four_cell(row), *cells])
    caption = f"Horizon {horizon}. Second lines: relative change of this run against the row above, %."
    return Table(["Family", "n", "this run", *(f"paper: {system}" for system in printed)], rows, caption)


def _paper_cell(ours: Mapping[str, Any], environment: str, system: str, horizon: int) -> str:
    printed_rows = papers.printed(environment, system, horizon, ours["family"])
    both = len(printed_rows) > 1
    lines = []
    for row in printed_rows:
        lines += [paper_cell(row.figures) + (f" ({row.table})" if both else ""), _relative(ours, row.figures)]
    return "\n".join(lines) or "-"


def _relative(ours: Mapping[str, Any] | None, figures: Mapping[str, float]) -> str:
    if ours is None:
        return "-"
    changes = [
        papers.relative_change(100 * ours[name], figures[metric]) if name in ours else None
        for metric, name in OURS.items()
    ]
    return " / ".join("---" if change is None else f"{change:+.1f}" for change in changes)
