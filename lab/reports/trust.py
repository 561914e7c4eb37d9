"""Compare the trust in predictions of finished runs with how often they are exactly right, by suite and horizon.

AUROC: chance that a right prediction has more trust than a wrong one. ECE: expected calibration error over tenths of
trust. The last columns: exact match among the half, and the 80 %, that is trusted most.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eval.commands.harness import read_results
from eval.scores.metrics import exact_match
from eval.scores.predictions import read_records
from eval.scores.tables import percent, table
from lab.reports.calibration import calibrate
from loopwm.records.errors import InputError

EXAMPLE = "python -m lab calibration runs/eval/small-observed"


@dataclass(frozen=True)
class Predictions:
    """Trust (N,), whether it was exactly right (N,), and horizon (N,) of predictions."""

    trust: NDArray[np.float64]
    right: NDArray[np.bool_]
    horizon: NDArray[np.int64]

    def line(self, name: str, horizon: int | None) -> list[str]:
        """Return a line of the table. horizon: None for all."""
        chosen = np.ones(len(self.trust), bool) if horizon is None else self.horizon == horizon
        result = calibrate(self.trust[chosen], self.right[chosen])
        at = [percent(share) for share in result.right_at.values()]
        numbers = [str(result.n), percent(result.right), f"{result.auroc:.3f}", f"{result.ece:.3f}"]
        return [name, "all" if horizon is None else str(horizon), *numbers, *at]


def read_predictions(folder: Path) -> Predictions:
    """Read the predictions of a finished run. Raises InputError for one without trust."""
    read_results(folder / "results.json")
    records = read_records(folder / "predictions.jsonl").values()
    if not any("trust" in record for record in records):
        raise InputError(f"{folder}: trust: missing; score the checkpoint again in another folder")
    trust = np.array([record.get("trust", 0.0) for record in records])  # a text that was cut cannot be right
    right = np.array([exact_match(record["prediction"], record["target"]) == 1 for record in records])
    return Predictions(trust, right, np.array([record["horizon"] for record in records]))


def report(folders: Sequence[Path]) -> str:
    """Return a line for each run and horizon, one for all, and how often predictions of a trust are right."""
    runs = [read_predictions(folder) for folder in folders]
    everything = Predictions(*(np.concatenate([getattr(run, f.name) for run in runs]) for f in fields(Predictions)))
    lines = [run.line(f.name, int(k)) for f, run in zip(folders, runs, strict=True) for k in np.unique(run.horizon)]
    header = ["Run", "Horizon", "n", "Exact", "AUROC", "ECE", "Exact at 50 %", "at 80 %"]
    bins = [[str(b.n), percent(b.trust), percent(b.right)] for b in calibrate(everything.trust, everything.right).bins]
    return table(header, [*lines, everything.line("all", None)]) + "\n" + table(["n", "Trust", "Exact"], bins)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="DIR", help="folders of finished runs of a checkpoint")


def run(args: argparse.Namespace) -> None:
    print(report(args.runs), end="")
