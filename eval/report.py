"""Results as Markdown, beside the rows the paper prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.papers import environment_of, paper_rows
from eval.scoring import OVERALL
from eval.selections import is_selection

FOUR = ("em", "f1", "bleu4", "entity_recall")
_CAVEAT = (
    "Figures are percent: EM / Token F1 / BLEU-4 / Entity recall. The paper's windows and metric definitions are not "
    "published, so its rows stand beside ours for orientation; they are not measured on the same windows."
)


def render_report(results: Mapping[str, Any]) -> str:
    """The content of `report.md` for the content of `results.json`."""
    overall = [row for row in results["rows"] if row["family"] == OVERALL]
    head = f"# {results['model']} on {results['suite']}, {results['context']} context\n\n"
    cut = f"Metrics {results['metrics_version']}. History cut to fit in {percent(results['windows_cut_share'])} % of "
    missing = f" {results['unanswered']} answers did not come and count as wrong." if results["unanswered"] else ""
    parts = [head + cut + f"{overall[0]['n']} windows.{missing}\n", "## By horizon\n\n" + _horizons_table(overall)]
    horizon = paper_rows()["horizon"]
    at_horizon = [row for row in results["rows"] if row["horizon"] == horizon]
    environment = _paper_environment(results["suite"], at_horizon)
    if environment is not None:
        title = f"## Horizon {horizon} by family, beside the paper\n\n{_CAVEAT}\n\n"
        parts.append(title + _paper_table(at_horizon, paper_rows()["tables"][environment]))
    else:
        last = max(row["horizon"] for row in results["rows"])
        rows = [row for row in results["rows"] if row["horizon"] == last]
        parts.append(f"## Horizon {last} by family\n\n" + _paper_table(rows, {}))
    return "\n".join(parts)


def _horizons_table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = ("bleu4_corpus", "entity_precision", "entity_f1", "em_changed", "em_unchanged")
    header = ["Horizon", "n", "EM (95 %)", "F1", "BLEU-4", "Entity", "corpus BLEU", "Entity P", "Entity F1"]
    header += ["EM changed", "EM unchanged", "decidable", "EM decidable"]
    lines = []
    for row in rows:
        low, high = row["ci95"]["em"]
        em = f"{percent(row['em'])} ({percent(low)}-{percent(high)})"
        cells = [percent(row.get(name)) for name in (*FOUR[1:], *names, "decidable_share", "em_decidable")]
        lines.append([str(row["horizon"]), str(row["n"]), em, *cells])
    return table(header, lines)


def _paper_environment(suite: str, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The environment whose rows of the paper stand beside these; a selection's overall figure is of other families."""
    return None if is_selection(suite) else environment_of(_families(rows))


def _families(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    return {row["family"] for row in rows} - {OVERALL}


def _paper_table(rows: Sequence[Mapping[str, Any]], systems: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        printed = [paper_cell(by_family.get(row["family"])) for by_family in systems.values()]
        lines.append([row["family"], str(row["n"]), four_cell(row), *printed])
    return table(["Family", "n", "this run", *(f"paper: {name}" for name in systems)], lines)


def render_comparison_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Several results side by side: a row a run, a column a horizon, overall figures."""
    horizons = sorted({row["horizon"] for results in runs for row in results["rows"]})
    lines = []
    for results in runs:
        by_horizon = {row["horizon"]: row for row in results["rows"] if row["family"] == OVERALL}
        cells = [four_cell(by_horizon[k]) if k in by_horizon else "-" for k in horizons]
        lines.append([results["model"], results["suite"], results["context"], *cells])
    environment = _paper_environment(runs[0]["suite"], runs[0]["rows"])
    if environment in paper_rows()["by_horizon"]:
        for name, by_k in paper_rows()["by_horizon"][environment].items():
            cells = [paper_cell(by_k.get(str(k), {}).get(OVERALL)) for k in horizons]
            lines.append([f"paper: {name}", "unpublished", "-", *cells])
    return f"{_CAVEAT}\n\n" + table(["Model", "Suite", "Context", *(f"horizon {k}" for k in horizons)], lines)


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f}"


def four_cell(row: Mapping[str, Any]) -> str:
    return " / ".join(percent(row.get(name)) for name in FOUR)


def paper_cell(row: Mapping[str, float] | None) -> str:
    return "-" if row is None else " / ".join(f"{row[name]:.1f}" for name in ("em", "f1", "bleu4", "entity"))


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)
