"""Store the results of runs, small enough to commit, and write the page of all results.

--keep copies the results of finished runs into the folder, without windows and deviations, and replaces earlier ones of
the same name. The page is made from the folder only.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from eval.models.base import STRONGEST_BASELINES
from eval.reports.results_store import (
    SHIPPED_NAME,
    SUITE_TITLES,
    Result,
    Row,
    called,
    environment_of,
    keep,
    last,
    overall,
    rank,
    read_store,
    stands,
)
from eval.scores.tables import percent, table, with_bounds
from loopwm.records.files import write_atomic

EXAMPLE = "python -m eval results docs/results --keep runs/eval/track runs/eval/small"

DATA = "data"
PAGE = "README.md"

LEAD = (
    "Made by `python -m eval results docs/results` from the stored results in [data](data/), which also hold task "
    "families and the command of each run. Exact match in per cent after five actions, unless said "
    "otherwise, with 95 % intervals over games. Unseen windows do not occur in any training episode. Elsewhere: [the "
    "shipped checkpoint](../results.md), [pictures and claims](pictures.md), [pixel worlds](pixels.md), "
    "[studies](studies.md), [the log](../LOG.md).\n"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder of the page; the results lie in its folder data")
    parser.add_argument("--keep", type=Path, nargs="+", default=[], metavar="RUN", help="finished runs to store")


def run(args: argparse.Namespace) -> None:
    for folder in args.keep:
        keep(folder, args.folder / DATA)
    write_atomic(args.folder / PAGE, render(read_store(args.folder / DATA)))
    print(args.folder / PAGE)


def label_of(result: Result) -> str:
    """Return model and context, and the number of windows unless all were scored."""
    counts = result["windows"]
    whole = result["provenance"]["limit"] is None and not counts["refused"]
    return f"{called(result['model'])}, {result['context']}" + ("" if whole else f", {counts['scored']} windows")


def render(runs: Sequence[Result]) -> str:
    """Return the content of the page."""
    parts = [f"# All results\n\n{LEAD}"]
    if any(called(run["model"]) == SHIPPED_NAME for run in runs):
        parts.append(f"## The checkpoint that ships\n\n{in_short(runs)}")
    for suite, title in SUITE_TITLES.items():
        if on_suite := [run for run in runs if run["suite"] == suite]:
            parts.append(f"## {title}\n\n{verdict_of(on_suite)}\n\n{_table(on_suite)}")
    return "\n".join(parts)


def in_short(result: Sequence[Result]) -> str:
    """Return the table of the shipped checkpoint in the context `observed`, also part of the README and its card."""
    header = ["Exact match, %", "windows", "1 action", "5 actions (95 %)", "of these, unseen", "no network"]
    rows = []
    for suite, title in SUITE_TITLES.items():
        runs = [run for run in result if run["suite"] == suite and run["context"] == "observed"]
        for run in (run for run in runs if called(run["model"]) == SHIPPED_NAME):
            rivals = (other for other in runs if other["model"] == STRONGEST_BASELINES[environment_of(run)])
            count = f"{run['pairs']['n']} pairs" if run["pairs"] else str(run["windows"]["scored"])
            rows.append([title, count, *_in_short(run), *(_in_short(o)[1] for o in rivals)])
    return table(header, rows)


def _in_short(run: Result) -> list[str]:
    """Return EM at horizon 1, at the farthest one with its interval, and of unseen windows; of pairs, both right."""
    if run["pairs"]:
        return ["-", with_bounds(run["pairs"], "both"), "-"]
    row, first = last(run), overall(run, 1)
    unseen = "-" if row.get("em_novel") is None else percent(row["em_novel"])
    return [percent(first["em"]) if first else "-", with_bounds(row, "em"), unseen]


def verdict_of(runs: Sequence[Result]) -> str:
    """Return one line that compares each checkpoint with the strongest baseline."""
    lines = []
    for run in (run for run in runs if rank(run) == 0):
        if stand := stands(run, runs):
            verdict, best = stand
            em, rival = percent(last(run)["em"]), percent(last(best)["em"])
            lines.append(f"**{label_of(run)}: {em}, {verdict} {label_of(best)} ({rival}).**")
    return " ".join(lines) or "No checkpoint was scored here."


def _cell(row: Row, name: str, count: str) -> str:
    return "-" if row.get(name) is None else f"{with_bounds(row, name)} of {row[count]}"


def _table(runs: Sequence[Result]) -> str:
    paired = any(run["pairs"] for run in runs)
    rows = []
    for run in runs:
        row, first = last(run), overall(run, 1)
        parts = [row.get(name) for name in ("em_novel", "em_seen", "em_decidable", "f1")]
        cells = ["-" if value is None else percent(value) for value in (first["em"] if first else None, *parts)]
        both = [_cell(run["pairs"], "both", "n") if run["pairs"] else "-"] if paired else []
        rows.append([label_of(run), _cell(row, "em", "n"), *cells, *both])
    header = ["Model, context", "all", "one action", "unseen", "seen", "answerable", "F1"]
    return table([*header, *(["both of a pair"] if paired else [])], rows)
