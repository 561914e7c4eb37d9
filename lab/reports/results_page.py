"""Store the results of runs, small enough to commit, and write the page of all results.

--keep copies the results of finished runs into the folder, without windows and deviations, and replaces earlier ones of
the same name. The page is made from the folder only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.commands.harness import read_results
from eval.models.base import STRONGEST_BASELINES
from eval.models.options import BASELINES
from eval.scores.rows import OVERALL
from eval.scores.tables import percent, table, with_bounds
from loopwm.records.errors import InputError
from loopwm.records.files import read_json, write_atomic

EXAMPLE = "python -m lab results docs/results --keep runs/eval/track runs/eval/small"

DATA = "data"
PAGE = "README.md"

LEAD = (
    "Made by `python -m lab results docs/results` from the stored results in [data](data/), which also hold task "
    "families and the command of each run. Exact match in per cent after five actions, unless said "
    "otherwise, with 95 % intervals over games. Unseen windows do not occur in any training episode. Elsewhere: [the "
    "shipped checkpoint](../results.md), [pictures and claims](pictures.md), [pixel worlds](pixels.md), "
    "[studies](studies.md), [the log](../LOG.md).\n"
)

Result = Mapping[str, Any]
Row = Mapping[str, Any]

SHIPPED_NAME = "loopwm-small"

SUITE_TITLES = {
    "scienceworld-probe": "ScienceWorld, what people try first",
    "scienceworld-500-noisy": "ScienceWorld, noisy paths",
    "scienceworld-counterfactual": "ScienceWorld, pairs of a path and another action",
    "scienceworld-500": "ScienceWorld, experts' paths",
    "alfworld-probe": "ALFWorld, what people try first",
    "alfworld-500-noisy": "ALFWorld, noisy paths",
    "alfworld-counterfactual": "ALFWorld, pairs of a path and another action",
    "alfworld-500": "ALFWorld, experts' paths",
}
"""Suites of the page, in its order."""

DIGITS = 4


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
    header = ["Exact match, %", "windows", "1 action", "5 actions (95 %)", "of these, unseen"]
    header += ["no network", "beside it"]
    rows = []
    for suite, title in SUITE_TITLES.items():
        runs = [run for run in result if run["suite"] == suite and run["context"] == "observed"]
        for run in (run for run in runs if called(run["model"]) == SHIPPED_NAME):
            rivals = [other for other in runs if other["model"] == STRONGEST_BASELINES[environment_of(run)]]
            count = f"{run['pairs']['n']} pairs" if run["pairs"] else str(run["windows"]["scored"])
            beside = [cell for rival in rivals for cell in (_in_short(rival)[1], _beside(run, rival))]
            rows.append([title, count, *_in_short(run), *beside])
    return table(header, rows)


def _in_short(run: Result) -> list[str]:
    """Return EM at horizon 1, at the farthest one with its interval, and of unseen windows; of pairs, both right."""
    if run["pairs"]:
        return ["-", with_bounds(run["pairs"], "both"), "-"]
    row, first = last(run), overall(run, 1)
    unseen = "-" if row.get("em_novel") is None else percent(row["em_novel"])
    return [percent(first["em"]) if first else "-", with_bounds(row, "em"), unseen]


def _beside(run: Result, rival: Result) -> str:
    """Compare the interval of `_in_short` with a rival's figure."""
    name = "both" if run["pairs"] else "em"
    ours, theirs = (one["pairs"] or last(one) for one in (run, rival))
    low, high = ours["ci95"][name]
    return "above" if low > theirs[name] else "below" if high < theirs[name] else "level"


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


def read_store(data: Path) -> tuple[Result, ...]:
    """Read the store: checkpoints before baselines, suites in the page's order. Raises InputError without results."""
    runs = [_read_result(path) for suite in SUITE_TITLES for path in sorted(data.glob(f"{suite}--*.json"))]
    if not runs:
        raise InputError(f"{data}: must hold results of runs, found none; add some with --keep RUN")
    _check_alike(data, runs)
    return tuple(sorted(runs, key=lambda run: (list(SUITE_TITLES).index(run["suite"]), rank(run), run["model"])))


def _read_result(path: Path) -> Result:
    """Read a stored result. Raises InputError if a mean is outside of its bounds."""
    result: Result = read_json(path)
    for row in (*result["rows"], *([result["pairs"]] if result["pairs"] else [])):
        for name, bounds in row.get("ci95", {}).items():
            if bounds and not bounds[0] <= row[name] <= bounds[1]:
                where = " ".join(str(row.get(key, "pairs")) for key in ("family", "horizon"))
                raise InputError(f"{path}: {where}: {name}: must be in its bounds {bounds}, got {row[name]}")
    return result


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
    result["rows"] = [_slim(row) for row in results["rows"]]
    write_result(data / f"{results['suite']}--{results['context']}--{called(results['model'])}.json", result)


def write_result(path: Path, result: Result) -> None:
    """Write a stored result, a line for each row."""
    head = {name: value for name, value in result.items() if name != "rows"}
    rows = ",\n".join(json.dumps(rounded(row), ensure_ascii=False) for row in result["rows"])
    write_atomic(path, f'{json.dumps(rounded(head), ensure_ascii=False)[:-1]}, "rows": [\n{rows}\n]}}\n')


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
