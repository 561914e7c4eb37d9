"""Compare the trust in predictions of finished runs with how often they are exactly right, by suite and horizon.

AUROC: chance that a right prediction has more trust than a wrong one. ECE: expected calibration error over tenths of
trust. Exact at 50 % and at 80 %: exact match among the half, and the 80 %, that is trusted most.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eval.commands.harness import read_results
from eval.scores.metrics import exact_match
from eval.scores.predictions import read_records
from eval.scores.tables import percent, table
from loopwm.records.errors import InputError

EXAMPLE = "python -m eval calibration runs/eval/small-observed"

BINS = 10
Probabilities = NDArray[np.float64]
Right = NDArray[np.bool_]


@dataclass(frozen=True)
class Bin:
    """Predictions whose trust is in one tenth of 0 .. 1. trust, right: means over its n predictions."""

    n: int
    trust: float
    right: float


@dataclass(frozen=True)
class Calibration:
    """Quality of the trust in n predictions, of which the share `right` is. auroc: NaN without both kinds."""

    n: int
    right: float
    auroc: float
    ece: float
    right_at: dict[int, float]
    bins: tuple[Bin, ...]


def calibrate(trust: Probabilities, right: Right) -> Calibration:
    """Compare the trust in predictions (N,) with whether they were right (N,). N must be above zero."""
    number = np.minimum((trust * BINS).astype(int), BINS - 1)
    members = [number == i for i in range(BINS)]
    bins = tuple(Bin(int(m.sum()), float(trust[m].mean()), float(right[m].mean())) for m in members if m.any())
    ece = sum(b.n * abs(b.trust - b.right) for b in bins) / len(trust)
    ranked = right[np.argsort(-trust, kind="stable")]  # stable: the order of the windows decides among equals
    right_at = {share: float(ranked[: max(1, len(ranked) * share // 100)].mean()) for share in (50, 80)}
    return Calibration(len(trust), float(right.mean()), auroc(trust, right), ece, right_at, bins)


def auroc(trust: Probabilities, right: Right) -> float:
    """Return the area under the ROC curve; equal trust counts half."""
    of_right, of_wrong = trust[right], np.sort(trust[~right])
    if not len(of_right) or not len(of_wrong):
        return float("nan")
    below = np.searchsorted(of_wrong, of_right, "left") + np.searchsorted(of_wrong, of_right, "right")
    return float(below.mean() / 2 / len(of_wrong))


class Group(NamedTuple):
    """Predictions of a run at one horizon: trust (N,), and whether each was exactly right (N,)."""

    run: str
    suite: str
    horizon: str
    trust: Probabilities
    right: Right


def read_groups(folder: Path) -> list[Group]:
    """Read the predictions of a finished run by horizon. Raises InputError for one without trust."""
    suite = read_results(folder / "results.json")["suite"]
    records = read_records(folder / "predictions.jsonl").values()
    if not any("trust" in record for record in records):
        raise InputError(f"{folder}: trust: missing; score the checkpoint again in another folder")
    by_horizon = defaultdict(list)
    for record in records:
        right = exact_match(record["prediction"], record["target"]) == 1
        by_horizon[record["horizon"]].append((record.get("trust", 0.0), right))  # a text that was cut cannot be right
    arrays = {k: map(np.array, zip(*pairs, strict=True)) for k, pairs in sorted(by_horizon.items())}
    return [Group(folder.name, suite, str(k), *pair) for k, pair in arrays.items()]


def report(groups: Sequence[Group]) -> str:
    """Return a line for each group, one for all, and how often predictions of each tenth of trust are right."""
    trust, right = (np.concatenate(arrays) for arrays in zip(*(group[3:] for group in groups), strict=True))
    lines = []
    for *names, of_trust, of_right in (*groups, Group("all", "all", "all", trust, right)):
        c = calibrate(of_trust, of_right)
        shares = [percent(share) for share in c.right_at.values()]
        lines.append([*names, str(c.n), percent(c.right), f"{c.auroc:.3f}", f"{c.ece:.3f}", *shares])
    header = ["Run", "Suite", "Horizon", "n", "Exact", "AUROC", "ECE", "Exact at 50 %", "at 80 %"]
    bins = [[str(b.n), percent(b.trust), percent(b.right)] for b in calibrate(trust, right).bins]
    return table(header, lines) + "\n" + table(["n", "Trust", "Exact"], bins)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="DIR", help="folders of finished runs of a checkpoint")


def run(args: argparse.Namespace) -> None:
    groups = [group for folder in args.runs for group in read_groups(folder)]
    print(report(groups), end="")
