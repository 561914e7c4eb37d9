"""Render results as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.scores.metrics import HEADLINE, METRICS
from eval.scores.rows import OVERALL

DETECTION = ("precision", "recall", "f1")
UNKNOWN = "Unseen and seen: unknown. No table of `build-seen` is about these windows and the model's train episodes."
_FIGURES = "Figures are percent: EM / Token F1 / BLEU-4 / Entity recall."


def render_report(results: Mapping[str, Any]) -> str:
    """Return the content of `report.md` for the content of `results.json`."""
    overall = [row for row in results["rows"] if row["family"] == OVERALL]
    head = f"# {results['model']} on {results['suite']}, {results['context']} context\n\n"
    missing = f" {results['unanswered']} answers did not come and count as wrong." if results["unanswered"] else ""
    head += f"{describe_windows(results)}{missing} History cut to fit in {percent(results['windows_cut_share'])} % of "
    head += "them.\n\n"
    head += f"Metrics {results['metrics_version']}, percent, with 95 % bounds over games.\n"
    parts = [head, _headline(results, overall), "## By horizon\n\n" + _horizons_table(overall)]
    parts.append(_judgements(overall))
    last = max(row["horizon"] for row in results["rows"])
    families = [[row["family"], str(row["n"]), four_cell(row)] for row in results["rows"] if row["horizon"] == last]
    parts.append(f"## Horizon {last} by family\n\n{_FIGURES}\n\n" + table(["Family", "n", "this run"], families))
    if results["refused"]:
        parts.append("## Refused windows\n\n" + table(["Window", "Reason"], sorted(results["refused"].items())))
    return "\n".join(parts)


def describe_windows(results: Mapping[str, Any]) -> str:
    """Return the numbers of windows scored and refused, and of those that are foreign to the checkpoint."""
    counts, foreign = results["windows"], results.get("foreign")
    scored = f"{counts['scored']} of {counts['asked']} windows scored"
    warning = f" {foreign} are worded unlike every training episode: expect wrong answers." if foreign else ""
    return f"{scored}, {counts['refused']} refused under `{results['context']}`.{warning}"


def _headline(results: Mapping[str, Any], overall: Sequence[Mapping[str, Any]]) -> str:
    """Return the main table: unseen and seen windows, and pairs."""
    pairs, known = results["pairs"], results["seen_in"]
    text = "## What decides\n\n"
    if known is None:
        text += f"{UNKNOWN}\n"
    else:
        text += (
            f"Unseen: last observation, actions and answer stand in none of {known['episodes']:,} train episodes "
            f"({known['transitions']:,} transitions, {known['episodes_sha256'][:12]}).\n\n"
        )
        lines = [[str(row["horizon"]), *(_split_cell(row, name) for name in ("novel", "seen"))] for row in overall]
        text += table(["Horizon", "EM unseen (95 %; n)", "EM seen (95 %; n)"], lines)
    if pairs is not None:
        names = ("both", "fact", "counterfact", "same")
        header = ["Pairs", "both right (95 %)", "fact", "counterfact", "the same said for both"]
        text += "\n" + table(header, [[str(pairs["n"]), *(with_bounds(pairs, name) for name in names)]])
    return text


def _split_cell(row: Mapping[str, Any], name: str) -> str:
    return f"{with_bounds(row, f'em_{name}')}; {row[f'n_{name}']}"


def with_bounds(row: Mapping[str, Any], name: str) -> str:
    """Format a figure in percent with its interval if it has one."""
    bounds = row["ci95"].get(name)
    return percent(row.get(name)) + ("" if bounds is None else f" ({percent(bounds[0])}-{percent(bounds[1])})")


def _horizons_table(rows: Sequence[Mapping[str, Any]]) -> str:
    others = [name for name in METRICS if name not in HEADLINE]
    header = ["Horizon", "n", "games", "EM (95 %)", "F1", "BLEU-4", "Entity", "corpus BLEU"]
    header += [METRICS[name].title for name in others] + ["EM changed (95 %; n)", "EM unchanged", "EM answerable"]
    lines = []
    for row in rows:
        cells = [with_bounds(row, "em"), *(percent(row.get(name)) for name in (*HEADLINE[1:], "bleu4_corpus", *others))]
        cells += [_split_cell(row, name) for name in ("changed", "unchanged", "decidable")]
        lines.append([*(str(row[name]) for name in ("horizon", "n", "games")), *cells])
    return table(header, lines)


def _judgements(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of refusals (from the text), and of ends and rewards if predicted."""
    parts = ["## Refusals, ends and rewards\n"]
    for name, title in (("refusal", "Refusals"), ("end", "Ends")):
        detections = [(row["horizon"], row[name]) for row in rows if name in row]
        lines = [
            [str(k), *(str(d[count]) for count in ("n", "predicted")), *map(percent, map(d.get, DETECTION))]
            for k, d in detections
        ]
        parts += [table(["Horizon", f"{title}: true", "predicted", *DETECTION], lines)] if detections else []
    rewards = [(row["horizon"], row["reward"]) for row in rows if "reward" in row]
    lines = [
        [str(k), str(r["n"]), percent(r["accuracy"]), str(r["n_nonzero"]), percent(r.get("accuracy_nonzero"))]
        for k, r in rewards
    ]
    header = ["Horizon", "Rewards", "accuracy", "not 0", "accuracy of those"]
    return "\n".join([*parts, table(header, lines)] if rewards else parts)


def render_comparison_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return several results side by side: a row a run, a column a horizon, overall figures."""
    horizons = sorted({row["horizon"] for results in runs for row in results["rows"]})
    lines = []
    for results in runs:
        by_horizon = {row["horizon"]: row for row in results["rows"] if row["family"] == OVERALL}
        cells = [four_cell(by_horizon[k]) if k in by_horizon else "-" for k in horizons]
        scored = str(results["windows"]["scored"])
        lines.append([results["model"], results["suite"], results["context"], scored, *cells])
    return f"{_FIGURES}\n\n" + table(["Model", "Suite", "Context", "n", *(f"horizon {k}" for k in horizons)], lines)


def percent(fraction: float | None) -> str:
    """Format a percentage; a dash for None or NaN."""
    return "-" if fraction is None or math.isnan(fraction) else f"{100 * fraction:.1f}"


def four_cell(row: Mapping[str, Any]) -> str:
    return " / ".join(percent(row.get(name)) for name in HEADLINE)


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)
