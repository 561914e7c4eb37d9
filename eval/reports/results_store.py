"""Results store: one small file a run, in the folder of the results page.

Results on suites are in the folder itself, others in a folder of their kind (`KINDS`). A file that was copied from a
printed table, because the run's own is lost, has the key `transcribed`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.commands.harness import read_results
from eval.models.base import STRONGEST_BASELINES
from eval.models.options import BASELINES
from eval.scores.rows import OVERALL
from loopwm.records.errors import InputError
from loopwm.records.files import read_json, write_atomic, write_json

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


@dataclass(frozen=True)
class ResultsStore:
    """All stored results by kind. claims: statements of the papers and the verdicts found here."""

    runs: tuple[Result, ...]
    studies: tuple[Result, ...]
    rollouts: tuple[Result, ...]
    agents: tuple[Result, ...]
    loads: tuple[Result, ...]
    claims: tuple[Result, ...]


def read_store(data: Path) -> ResultsStore:
    """Read the store: checkpoints before baselines, suites in the page's order. Raises InputError without results."""
    runs = [read_json(path) for path in sorted(data.glob("*.json")) if path.name != "claims.json"]
    if not runs:
        raise InputError(f"{data}: must hold results of runs, found none; add some with --keep RUN")
    _check_alike(data, runs)
    runs.sort(key=lambda result: (list(SUITE_TITLES).index(result["suite"]), rank(result), result["model"]))
    others = {kind: tuple(read_json(path) for path in sorted((data / kind).glob("*.json"))) for kind in KINDS}
    claims = data / "claims.json"
    return ResultsStore(tuple(runs), **others, claims=tuple(read_json(claims) if claims.is_file() else ()))


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
    """Store the results of a finished run, study or rollout, replacing an earlier one of the same name.

    Raises InputError for a run that is not finished, of a suite that the page does not show, or of an unknown kind.
    """
    path = folder / "results.json"
    if not path.is_file():
        raise InputError(f"{folder}: must be a finished run with a results.json")
    results = read_json(path)
    if "suite" in results:
        _keep_run(folder, read_results(path), data)
        return
    kind = next((kind for kind, (mark, _) in KINDS.items() if mark in results), None)
    if kind is None:
        raise InputError(f"{path}: must have one of the keys suite, {', '.join(mark for mark, _ in KINDS.values())}")
    name, result = KINDS[kind][1](results)
    known = ("command", "commit", "commits", "model_sha256")
    source = {name: results["provenance"][name] for name in known if name in results["provenance"]}
    write_json(data / kind / f"{name}.json", _rounded({**result, **source}))


def _keep_run(folder: Path, results: dict[str, Any], data: Path) -> None:
    """Store a run without windows and deviations."""
    if results["suite"] not in SUITE_TITLES:
        raise InputError(f"{folder}: suite: must be one of {', '.join(SUITE_TITLES)}, got {results['suite']!r}")
    result = {
        **{name: results[name] for name in ("model", "suite", "context", "metrics_version", "windows", "unanswered")},
        "provenance": {name: value for name, value in results["provenance"].items() if name != "versions"},
        "refused": len(results["refused"]),
        "seen_in": results["seen_in"],
        "pairs": results["pairs"] and _without_errors(results["pairs"]),
    }
    rows = ",\n".join(json.dumps(_rounded(_slim(row)), ensure_ascii=False) for row in results["rows"])
    text = f'{json.dumps(_rounded(result), ensure_ascii=False)[:-1]}, "rows": [\n{rows}\n]}}'
    write_atomic(data / f"{results['suite']}--{results['context']}--{called(results['model'])}.json", text + "\n")


def _slim(row: Row) -> dict[str, Any]:
    """Return all figures of an overall row; of a family, exact match and its bounds."""
    if row["family"] == OVERALL:
        return _without_errors(row)
    result = {name: row[name] for name in ("family", "horizon", "n", "em")}
    return {**result, "ci95": {"em": row["ci95"]["em"]}} if "em" in row["ci95"] else result


def _without_errors(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "stderr"}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _study(results: Row) -> tuple[str, dict[str, Any]]:
    """Return the differences from the reference arm, and each arm's cost.

    Differences are of EM (mean over horizons), or of pixels the share of right frames. The file is named after the
    checkpoint, or the configuration that its arms were trained from. Exit rules are compared with random exits of equal
    mean depth: the best depth was chosen on the same windows.
    """
    study, settings = results["study"], results.get("settings", {})
    model = called(settings["model"]) if settings else ""
    base = Path(results["protocol"]["base"]).stem if "base" in results.get("protocol", {}) else ""
    if study == "halting":
        differences = [policy["against_random"] for policy in results["policies"] if policy["against_random"]]
        costs: dict[str, float] = {}
    elif "transitions" in results:
        whole = [d for d in results["differences"] if (d["part"], d["creatures"]) == ("frame", "all")]
        differences, costs = [{**d, "arm": d["ours"], "reference": d["theirs"]} for d in whole], {}
    else:
        differences = [d for d in results["differences"] if (d["metric"], d["horizon"]) == ("em", "all")]
        costs = results.get("flops_per_token") or {arm["arm"]: arm["flops_per_token"] for arm in results["arms"]}
    means = {m["arm"]: m["mean"] for m in results.get("means", []) if (m["metric"], m["horizon"]) == ("em", "all")}
    by_arm = {f"T={name}" if name.isdecimal() else name: flops for name, flops in costs.items()}
    return "--".join(part.replace(" ", "-") for part in (study, model or base) if part), {
        "study": study,
        "model": model,
        "base": base,
        "windows": results.get("windows") or results["transitions"],
        "seeds": max((len(d["by_seed"]) for d in differences), default=1),
        "differences": [
            {name: d[name] for name in ("arm", "reference", "difference", "low", "high", "by_seed")}
            for d in differences
        ],
        "costs": [{"arm": a, "mflops": by_arm[a] / 1e6, "em": means[a]} for a in by_arm if a in means],
    }


def _rollout(results: Row) -> tuple[str, dict[str, Any]]:
    rows = [
        {**{name: row[name] for name in ("way", "depth", "n", "em")}, "ci95": row["ci95"].get("em")}
        for row in results["rows"]
    ]
    difference = next(d for d in results["latent_minus_fed_back"] if d["metric"] == "em")
    model = called(results["model"])
    return f"{results['env']}--{model}", {
        **{name: results[name] for name in ("env", "context", "n")},
        "model": model,
        "rows": rows,
        "latent_minus_fed_back": {name: difference[name] for name in ("difference", "low", "high")},
    }


def _agents(results: Row) -> tuple[str, dict[str, Any]]:
    """Return final scores of 0 to 100 by arm, the model's own arm last in `differences`."""
    provenance = results["provenance"]
    return f"look-ahead--{provenance['model_sha256'][:8]}", {
        "split": provenance["split"],
        "n": results["n"],
        "arms": {arm: row["score"] for arm, row in results["arms"].items()},
        "differences": [{"a": d["a"], "b": d["b"], **d["score"]} for d in results["differences"]],
    }


def _load(results: Row) -> tuple[str, dict[str, Any]]:
    return results["model"], {name: results[name] for name in ("model", "load", "roof")}


KINDS: dict[str, tuple[str, Callable[[Row], tuple[str, dict[str, Any]]]]] = {
    "studies": ("study", _study),
    "rollouts": ("latent_minus_fed_back", _rollout),
    "agents": ("task_scores", _agents),
    "loads": ("load", _load),
}
"""By folder: the key that only its results.json has, and the name and content of the stored file."""
