"""Results store: one small file a run on a suite, in the folder of the results page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.commands.harness import read_results
from eval.models.base import STRONGEST_BASELINES
from eval.models.options import BASELINES
from eval.scores.rows import OVERALL
from loopwm.records.errors import InputError
from loopwm.records.files import read_json, write_atomic

Result = Mapping[str, Any]
Row = Mapping[str, Any]

SHIPPED_NAME = "loopwm-small"

SUITE_TITLES = {
    "scienceworld-500": "ScienceWorld, experts' paths",
    "scienceworld-500-noisy": "ScienceWorld, noisy paths",
    "scienceworld-counterfactual": "ScienceWorld, pairs of a path and another action",
    "alfworld-500": "ALFWorld, experts' paths",
    "alfworld-500-noisy": "ALFWorld, noisy paths",
    "alfworld-counterfactual": "ALFWorld, pairs of a path and another action",
}
"""Suites of the page, in its order."""

DIGITS = 4


def read_store(data: Path) -> tuple[Result, ...]:
    """Read the store: checkpoints before baselines, suites in the page's order. Raises InputError without results."""
    runs = [read_json(path) for suite in SUITE_TITLES for path in sorted(data.glob(f"{suite}--*.json"))]
    if not runs:
        raise InputError(f"{data}: must hold results of runs, found none; add some with --keep RUN")
    _check_alike(data, runs)
    return tuple(sorted(runs, key=lambda run: (list(SUITE_TITLES).index(run["suite"]), rank(run), run["model"])))


def _check_alike(data: Path, runs: Sequence[Result]) -> None:
    """Raise InputError if runs of a suite are on different windows or split them differently into seen and unseen."""
    for suite in {run["suite"] for run in runs}:
        of = [run for run in runs if run["suite"] == suite]
        windows = {run["provenance"].get("suite_sha256") for run in of}
        seen_tables = {run["seen_in"]["episodes_sha256"] for run in of if run.get("seen_in")}
        if len(windows) > 1 or len(seen_tables) > 1:
            what = "windows" if len(windows) > 1 else "tables of what was seen in training"
            raise InputError(f"{data}: {suite}: runs must have the same {what}; rerun and store them")


def rank(run: Result) -> int:
    """Return the sort key: checkpoints, then the strongest baseline, other baselines, and the rest."""
    if "model_sha256" in run["provenance"]:
        return 0
    if run["model"] == STRONGEST_BASELINES[environment_of(run)]:
        return 1
    return 2 if run["model"] in BASELINES else 3


def environment_of(run: Result) -> str:
    environment: str = run["suite"].partition("-")[0]
    return environment


def called(model: str) -> str:
    """Return the service's name of the shipped checkpoint, the folder's name of others."""
    return SHIPPED_NAME if model == "loopwm/pretrained" else Path(model).name


def overall(run: Result, horizon: int) -> Row | None:
    rows = (row for row in run["rows"] if row["family"] == OVERALL and row["horizon"] == horizon)
    return next(rows, None)


def last(run: Result) -> Row:
    """Return the overall row of the farthest horizon."""
    rows: list[Row] = [row for row in run["rows"] if row["family"] == OVERALL]
    return max(rows, key=lambda row: row["horizon"])


def stands(run: Result, runs: Sequence[Result]) -> tuple[str, Result] | None:
    """Compare a checkpoint's interval at its last horizon with the best baseline; return verdict and baseline."""
    row = last(run)
    rivals = [baseline for baseline in runs if rank(baseline) in (1, 2) and last(baseline)["horizon"] == row["horizon"]]
    if not rivals:
        return None
    best = max(rivals, key=lambda baseline: float(last(baseline)["em"]))
    low, high = row["ci95"]["em"]
    rival = last(best)["em"]
    return "above" if low > rival else "below" if high < rival else "not told apart from", best


def keep(folder: Path, data: Path) -> None:
    """Store the results of a finished run without windows and deviations, replacing an earlier one of the same name.

    Raises InputError for a run that is not finished or of a suite that the page does not show.
    """
    path = folder / "results.json"
    if not path.is_file():
        raise InputError(f"{folder}: must be a finished run with a results.json")
    results = read_results(path)
    if results["suite"] not in SUITE_TITLES:
        raise InputError(f"{folder}: suite: must be one of {', '.join(SUITE_TITLES)}, got {results['suite']!r}")
    result = {
        **{name: results[name] for name in ("model", "suite", "context", "metrics_version", "windows", "unanswered")},
        "provenance": {name: value for name, value in results["provenance"].items() if name != "versions"},
        "refused": len(results["refused"]),
        "seen_in": results["seen_in"],
        "pairs": results["pairs"] and _without_errors(results["pairs"]),
    }
    rows = ",\n".join(json.dumps(rounded(_slim(row)), ensure_ascii=False) for row in results["rows"])
    text = f'{json.dumps(rounded(result), ensure_ascii=False)[:-1]}, "rows": [\n{rows}\n]}}'
    write_atomic(data / f"{results['suite']}--{results['context']}--{called(results['model'])}.json", text + "\n")


def _slim(row: Row) -> dict[str, Any]:
    """Return all figures of an overall row; of a family, exact match and its bounds."""
    if row["family"] == OVERALL:
        return _without_errors(row)
    result = {name: row[name] for name in ("family", "horizon", "n", "em")}
    return {**result, "ci95": {"em": row["ci95"]["em"]}} if "em" in row["ci95"] else result


def _without_errors(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "stderr"}


def rounded(value: Any) -> Any:
    """Round every float in a JSON value to DIGITS decimals."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value
