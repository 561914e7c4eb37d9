"""Keep what runs came to, small enough to commit, and make the page of all that is kept.

--keep copies the results of finished runs into the folder, without windows and deviations; a run of the same model,
suite and context takes the place of the earlier one. The page and its plots are made of the folder alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.commands.harness import read_results
from eval.models.base import OPPONENTS
from eval.scores.error_kinds import ERROR_KINDS
from eval.scores.rows import OVERALL
from eval.scores.tables import percent, table
from loopwm.records.errors import InputError
from loopwm.records.files import read_json, write_atomic

EXAMPLE = "python -m eval ledger docs/results --keep runs/eval/track runs/eval/small"

Kept = Mapping[str, Any]
Row = Mapping[str, Any]

SHIPPED = "loopwm-small"
DATA = "data"
PAGE = "README.md"

SUITES = {
    "scienceworld-500": "ScienceWorld, experts' paths",
    "scienceworld-500-noisy": "ScienceWorld, noisy paths",
    "scienceworld-counterfactual": "ScienceWorld, pairs of a path and another action",
    "alfworld-500": "ALFWorld, experts' paths",
    "alfworld-500-noisy": "ALFWorld, noisy paths",
    "alfworld-counterfactual": "ALFWorld, pairs of a path and another action",
}
"""Those that the page shows, in its order."""

DIGITS = 4
LEAD = (
    "Made by `python -m eval ledger` of what each run came to, which lies beside this page in `data/`. Exact match in "
    "per cent at horizon 5 (five actions, only the last observation decoded) unless said otherwise, 95 % intervals "
    "over games. Novel: windows whose last observation, actions and answer stand in no train episode. A verdict sets "
    "a checkpoint's interval beside a floor's mean, which may be of more windows; `eval report` pairs those that both "
    "have.\n"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="of the page; what is kept lies in its folder data")
    parser.add_argument("--keep", type=Path, nargs="+", default=[], metavar="RUN", help="finished runs to keep")


def run(args: argparse.Namespace) -> None:
    for folder in args.keep:
        keep(folder, args.folder / DATA)
    for name, content in render(read_kept(args.folder / DATA)):
        write_atomic(args.folder / name, content)
    print(args.folder / PAGE)


def keep(folder: Path, data: Path) -> None:
    """Raises InputError for a run that is not finished, or of a suite that the page does not show."""
    path = folder / "results.json"
    if not path.is_file():
        raise InputError(f"{folder}: not a finished run: it has no results.json")
    results = read_results(path)
    if results["suite"] not in SUITES:
        raise InputError(f"{folder}: suite: {results['suite']!r} is not one of {', '.join(SUITES)}")
    model = called(results["model"])
    kept = {
        **{name: results[name] for name in ("model", "suite", "context", "metrics_version", "windows", "unanswered")},
        "provenance": {name: value for name, value in results["provenance"].items() if name != "versions"},
        "refused": len(results["refused"]),
        "seen_in": results["seen_in"],
        "pairs": results["pairs"] and _without_errors(results["pairs"]),
    }
    rows = ",\n".join(json.dumps(_rounded(_slim(row)), ensure_ascii=False) for row in results["rows"])
    text = f'{json.dumps(_rounded(kept), ensure_ascii=False)[:-1]}, "rows": [\n{rows}\n]}}'
    write_atomic(data / f"{results['suite']}--{results['context']}--{model}.json", text + "\n")


def called(model: str) -> str:
    """The shipped checkpoint by its name in the service, others by their folders."""
    return SHIPPED if model == "loopwm/pretrained" else Path(model).name


def _slim(row: Row) -> dict[str, Any]:
    """All figures of the overall rows; of a family, exact match and its bounds."""
    if row["family"] == OVERALL:
        return _without_errors(row)
    kept = {name: row[name] for name in ("family", "horizon", "n", "em")}
    return {**kept, "ci95": {"em": row["ci95"]["em"]}} if "em" in row["ci95"] else kept


def _without_errors(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "stderr"}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def read_kept(data: Path) -> list[Kept]:
    """Raises InputError where nothing is kept."""
    found = [read_json(path) for path in sorted(data.glob("*.json"))]
    if not found:
        raise InputError(f"{data}: nothing is kept there")
    return sorted(found, key=lambda kept: (list(SUITES).index(kept["suite"]), _rank(kept), kept["model"]))


def _rank(kept: Kept) -> int:
    """Checkpoints first, then the opponent that counts, then the other floors."""
    if "model_sha256" in kept["provenance"]:
        return 0
    return 1 if kept["model"] == OPPONENTS[_environment(kept)] else 2


def _environment(kept: Kept) -> str:
    environment: str = kept["suite"].partition("-")[0]
    return environment


def name_of(kept: Kept) -> str:
    """Model and context, and how many windows where it is not all of them."""
    counts = kept["windows"]
    whole = kept["provenance"]["limit"] is None and not counts["refused"]
    return f"{called(kept['model'])}, {kept['context']}" + ("" if whole else f", {counts['scored']} windows")


def render(kept: Sequence[Kept]) -> Iterator[tuple[str, str]]:
    """(file name, content) of the page and its plots."""
    parts = [f"# All results\n\n{LEAD}"]
    if any(called(run["model"]) == SHIPPED for run in kept):
        parts.append(f"## The checkpoint that ships\n\n{in_short(kept)}")
    for suite, title in SUITES.items():
        runs = [run for run in kept if run["suite"] == suite]
        if not runs:
            continue
        plot = f"{suite}.svg"
        yield plot, _plot(suite, runs)
        parts.append(f"## {title}\n\n{verdict(runs)}\n\n![exact match by horizon]({plot})\n\n{_table(runs)}")
        if any(row["family"] != OVERALL for run in runs for row in run["rows"]):
            parts.append(_fold("By family", _families(runs)))
        parts.append(_fold("What is wrong", _errors(runs)))
        parts.append(_fold("Commands", "".join(f"    {run['provenance']['command']}\n" for run in runs)))
    yield PAGE, "\n".join(parts)


def in_short(kept: Sequence[Kept]) -> str:
    """The table of the shipped checkpoint, as an agent would ask it, that the README and its card show too."""
    header = ["Exact match, %", "windows", "1 action", "5 actions", "novel", "without learning"]
    rows = []
    for suite, title in SUITES.items():
        runs = [run for run in kept if run["suite"] == suite and run["context"] == "observed"]
        for run in (run for run in runs if called(run["model"]) == SHIPPED):
            rivals = (other for other in runs if other["model"] == OPPONENTS[_environment(run)])
            rows.append([title, str(run["windows"]["scored"]), *_in_short(run), *(_in_short(o)[1] for o in rivals)])
    return table(header, rows)


def _in_short(run: Kept) -> list[str]:
    """At horizon 1, at the farthest one with its interval, and of novel windows there; of pairs: both right."""
    if run["pairs"]:
        return ["-", _bounded(run["pairs"]["both"], run["pairs"]["ci95"]["both"]), "-"]
    row, first = last(run), overall(run, 1)
    novel = "-" if row.get("em_novel") is None else percent(row["em_novel"])
    return [percent(first["em"]) if first else "-", _bounded(row["em"], row["ci95"]["em"]), novel]


def _bounded(value: float, bounds: Sequence[float]) -> str:
    low, high = bounds
    return f"{percent(value)} ({percent(low)}-{percent(high)})"


def overall(run: Kept, horizon: int) -> Row | None:
    rows = (row for row in run["rows"] if row["family"] == OVERALL and row["horizon"] == horizon)
    return next(rows, None)


def last(run: Kept) -> Row:
    """The overall row of the farthest horizon."""
    rows: list[Row] = [row for row in run["rows"] if row["family"] == OVERALL]
    return max(rows, key=lambda row: row["horizon"])


def verdict(runs: Sequence[Kept]) -> str:
    """How each checkpoint stands beside the best program that learns nothing, in a line."""
    floors = [run for run in runs if _rank(run) > 0]
    lines = []
    for run in (run for run in runs if _rank(run) == 0):
        row = last(run)
        rivals = [(last(floor)["em"], name_of(floor)) for floor in floors if last(floor)["horizon"] == row["horizon"]]
        if not rivals:
            continue
        best, name = max(rivals)
        low, high = row["ci95"]["em"]
        told = "above" if low > best else "below" if high < best else "not told apart from"
        lines.append(f"**{name_of(run)}: {percent(row['em'])}, {told} {name} ({percent(best)}).**")
    return " ".join(lines) or "No checkpoint was scored here."


def _cell(row: Row, name: str, count: str) -> str:
    if row.get(name) is None:
        return "-"
    low, high = row["ci95"].get(name, (None, None))
    bounds = "" if low is None else f" ({percent(low)}-{percent(high)})"
    return f"{percent(row[name])}{bounds} of {row[count]}"


def _table(runs: Sequence[Kept]) -> str:
    paired = any(run["pairs"] for run in runs)
    header = ["Model, context", "all", "novel", "seen", "decidable", "horizon 1", "F1", "entity recall"]
    rows = []
    for run in runs:
        row = last(run)
        first = overall(run, 1)
        cells = [_cell(row, name, n) for name, n in (("em", "n"), ("em_novel", "n_novel"), ("em_seen", "n_seen"),
                                                     ("em_decidable", "n_decidable"))]  # fmt: skip
        rows.append([name_of(run), *cells, percent(first["em"]) if first else "-", percent(row["f1"]),
                     percent(row["entity_recall"]), *([_both(run)] if paired else [])])  # fmt: skip
    return table([*header, *(["both of a pair"] if paired else [])], rows)


def _both(run: Kept) -> str:
    return _cell(run["pairs"], "both", "n") if run["pairs"] else "-"


def _families(runs: Sequence[Kept]) -> str:
    at = [{row["family"]: row for row in run["rows"] if row["horizon"] == last(run)["horizon"]} for run in runs]
    counts = {name: row["n"] for rows in at for name, row in rows.items() if name != OVERALL}
    names = sorted(counts, key=lambda name: (-counts[name], name))
    lines = [[name, *(f"{percent(rows[name]['em'])} of {rows[name]['n']}" if name in rows else "-" for rows in at)]
             for name in names]  # fmt: skip
    return table(["Family", *map(name_of, runs)], lines)


def _errors(runs: Sequence[Kept]) -> str:
    lines = []
    for run in runs:
        row = last(run)
        errors, refusal = row["errors"], row["refusal"]
        told = [f"{percent(refusal[name])}" if name in refusal else "-" for name in ("precision", "recall")]
        lines.append([name_of(run), str(sum(errors.values())), *(str(errors[kind]) for kind in ERROR_KINDS),
                      " / ".join(told)])  # fmt: skip
    return table(["Model, context", "wrong", *ERROR_KINDS, "refusals told: precision / recall"], lines)


def _fold(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n</details>\n"


def _plot(suite: str, runs: Sequence[Kept]) -> str:
    from eval.reports.analysis import mean_of  # matplotlib takes a second
    from eval.reports.plots import Line, look, plot_lines

    horizons = sorted({row["horizon"] for run in runs for row in run["rows"]})
    lines = []
    for index, run in enumerate(runs):
        rows = [overall(run, horizon) for horizon in horizons]
        means = [None if row is None else mean_of(row, "em", row["n"]) for row in rows]
        lines.append(Line(name_of(run), look(index, 0), means))
    return plot_lines(suite, "horizon", "exact match", [str(horizon) for horizon in horizons], lines)
