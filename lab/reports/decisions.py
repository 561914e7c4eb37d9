"""Compare which of two plans a model prefers with what they bring in the simulator, over pairs of finished runs.

The plans of a pair start at the same place and differ in one action. A plan is worth its points, the sum of its
rewards, and loses by each action that is refused. Only pairs whose plans differ in the simulator count. A model is
right if it orders their imagined outcomes alike, and half right if it imagines the same worth for both; an action that
it imagines refused pays nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eval.commands.harness import read_results
from eval.scores.intervals import fraction_interval95
from eval.scores.predictions import Key, Record, read_records
from eval.scores.rows import pair_of
from eval.scores.suites import Suite, load_suite
from eval.scores.tables import percent, table
from loopwm.records.errors import InputError
from loopwm.records.refusals import is_refused
from loopwm.records.windows import COUNTERFACT, FACT, Window, game_of

EXAMPLE = "python -m lab decisions runs/eval/small-scienceworld-counterfactual"


class Outcome(NamedTuple):
    """Points of a plan, and the number of its actions that are refused."""

    points: float
    refusals: int


CRITERIA: dict[str, Callable[[Outcome], Any]] = {
    "points": lambda outcome: outcome.points,
    "refusals": lambda outcome: -outcome.refusals,
    "points, then refusals": lambda outcome: (outcome.points, -outcome.refusals),
}
"""Worth of an outcome, more is better, by the name of the criterion."""


class Decision(NamedTuple):
    """The plans of a pair: their outcomes in the simulator, and as imagined."""

    game: str
    simulated: tuple[Outcome, Outcome]
    imagined: tuple[Outcome, Outcome]


@dataclass(frozen=True)
class Accuracy:
    """Share of n decisions that are right, with 95 % bounds over games, and share whose plans are imagined alike."""

    n: int
    right: float
    low: float
    high: float
    undecided: float


def decisions_of(windows: Sequence[Window], records: Mapping[Key, Record]) -> list[Decision]:
    """Return the decisions of a suite's pairs. Raises KeyError where a horizon of a window has no record."""
    by_id = {window["id"]: window for window in windows}
    pairs = ((by_id[name], by_id.get(pair_of(name) + COUNTERFACT)) for name in by_id if name.endswith(FACT))
    return [
        Decision(game_of(a), (_simulated(a), _simulated(b)), (_imagined(a, records), _imagined(b, records)))
        for a, b in pairs
        if b is not None
    ]


def _keys(window: Window) -> list[Key]:
    return [(window["id"], k) for k in range(1, len(window["actions"]) + 1)]


def _simulated(window: Window) -> Outcome:
    return Outcome(sum(window["rewards"]), sum(map(is_refused, window["observations"])))


def _imagined(window: Window, records: Mapping[Key, Record]) -> Outcome:
    steps = [records[key] for key in _keys(window)]
    carried_out = [step for step in steps if not is_refused(step["prediction"])]
    return Outcome(sum(step.get("reward", 0.0) for step in carried_out), len(steps) - len(carried_out))


def accuracy(decisions: Sequence[Decision], criterion: str) -> Accuracy | None:
    """Return how many decisions are right by a criterion, None if no two plans differ by it in the simulator."""
    worth = CRITERIA[criterion]
    scores, games = [], []
    for decision in decisions:
        a, b = map(worth, decision.simulated)
        if a != b:
            imagined_a, imagined_b = map(worth, decision.imagined)
            scores.append(0.5 if imagined_a == imagined_b else float((imagined_a > imagined_b) == (a > b)))
            games.append(decision.game)
    if not scores:
        return None
    values = np.array(scores, dtype=np.float64)
    ((low,), (high,)) = fraction_interval95(values[:, None], games)
    return Accuracy(len(values), float(values.mean()), float(low), float(high), float((values == 0.5).mean()))


def read_decisions(folder: Path, suite: Suite | None = None) -> list[Decision]:
    """Read the decisions of a finished run.

    Args:
        folder: of the run.
        suite: its windows, None for those of the committed suite that it names.

    Raises:
        InputError: the run is of other windows, has no pairs, or did not predict every action of a window
    """
    results = read_results(folder / "results.json")
    suite = load_suite(results["suite"]) if suite is None else suite
    if suite.sha256 != results["provenance"]["suite_sha256"]:
        raise InputError(f"{folder}: suite: must be {suite.name} with its present windows; name its file with --suite")
    records = read_records(folder / "predictions.jsonl")
    scored = [window for window in suite.windows if window["id"] in results["games"]]
    for name, k in (key for window in scored for key in _keys(window) if key not in records):
        raise InputError(f"{folder}: horizons: must have every action of {name}, lacks {k}")
    if not (decisions := decisions_of(scored, records)):
        raise InputError(f"{folder}: suite: must have pairs, such as scienceworld-counterfactual, got {suite.name!r}")
    return decisions


def report(runs: Mapping[str, Sequence[Decision]]) -> str:
    """Return a line for each run and criterion. runs: decisions by the run's name."""
    lines = []
    for name, decisions in runs.items():
        for criterion in CRITERIA:
            if a := accuracy(decisions, criterion):
                bounds = f"{percent(a.low)} to {percent(a.high)}"
                lines.append([name, criterion, str(a.n), percent(a.right), bounds, percent(a.undecided)])
    return table(["Run", "Plans differ in", "n", "Right", "95 %", "Imagined alike"], lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="DIR", help="folders of finished runs on pairs")
    parser.add_argument("--suite", help="suite or window file of the runs (default: the suite that each names)")


def run(args: argparse.Namespace) -> None:
    suite = None if args.suite is None else load_suite(args.suite)
    print(report({folder.name: read_decisions(folder, suite) for folder in args.runs}), end="")
