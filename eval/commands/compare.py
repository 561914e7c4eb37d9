"""Compare two finished runs on the same windows: paired differences A - B with bootstrap 95 % bounds over games.

Windows that one of the runs refused are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from eval.commands.harness import read_results
from eval.scores.intervals import PairedDifference, Values, paired_difference
from eval.scores.metrics import METRICS
from eval.scores.predictions import Record, read_records
from eval.scores.tables import percent, table
from loopwm.records.errors import InputError

EXAMPLE = "python -m eval compare runs/eval/small-observed runs/eval/copy-observed"


def compare_runs(folder_a: Path, folder_b: Path) -> list[PairedDifference]:
    """Compare two runs at every shared horizon. Raises InputError for unfinished runs or different windows."""
    results_a, results_b = (read_results(folder / "results.json") for folder in (folder_a, folder_b))
    if results_a["provenance"]["suite_sha256"] != results_b["provenance"]["suite_sha256"]:
        raise InputError(f"{folder_b}: suite: must have the windows of {folder_a}, got {results_b['suite']!r}")
    a, b = (read_records(folder / "predictions.jsonl") for folder in (folder_a, folder_b))
    shared = sorted({k for _, k in a} & {k for _, k in b})
    if not shared:
        raise InputError(f"{folder_b}: horizons: must share one with {folder_a}")
    refused = results_a["refused"].keys() | results_b["refused"].keys()
    games = results_a["games"]
    differences = []
    for k in shared:
        at_a, at_b = (
            {name: record for (name, horizon), record in run.items() if horizon == k and name not in refused}
            for run in (a, b)
        )
        if not at_a or at_a.keys() != at_b.keys():
            raise InputError(f"{folder_b}: horizon {k}: must have the same windows, got {len(at_b)} and {len(at_a)}")
        names = sorted(at_a)
        for metric in METRICS:
            scores_a, scores_b = (_scores(metric, [(games[name], run[name]) for name in names]) for run in (at_a, at_b))
            differences.append(paired_difference(metric, k, scores_a, scores_b, [games[name] for name in names]))
    defined = [difference for difference in differences if not np.isnan(difference.difference)]  # NaN: names unknown
    return sorted(defined, key=lambda d: list(METRICS).index(d.metric))  # stable: horizons in order


def _scores(metric: str, records: Iterable[tuple[str, Record]]) -> Values:
    """Return the scores by one metric. records: pairs of game (its name begins with the environment) and record."""
    score = METRICS[metric].score
    return np.array([score(game.partition("/")[0], record["prediction"], record["target"]) for game, record in records])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_a", type=Path, metavar="DIR_A", help="folder of a finished run")
    parser.add_argument("run_b", type=Path, metavar="DIR_B", help="folder of a run on the same windows")


def run(args: argparse.Namespace) -> None:
    lines = []
    for d in compare_runs(args.run_a, args.run_b):
        bounds = f"{percent(d.low)} to {percent(d.high)}"
        figures = [percent(d.a), percent(d.b), percent(d.difference), bounds]
        lines.append([d.metric, str(d.horizon), str(d.n), *figures])
    print(f"A: {args.run_a}\nB: {args.run_b}\n")
    print(table(["Metric", "Horizon", "n", "A", "B", "A - B", "95 %"], lines), end="")
