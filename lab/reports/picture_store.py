"""Store of the pictures page: results of studies, agents, the service and more, one small file each.

They are in folders of their kind (`KINDS`) beside the runs on suites. A file that was copied from a printed table,
because the run's own is lost, has the key `transcribed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.commands.calibration import Probabilities, Right
from lab.figures.predictions import FOLDER, SUFFIX, trusts_and_exact
from lab.reports.claims import verdict
from lab.reports.results_page import SHIPPED_NAME, SUITE_TITLES, Result, Row, called, read_store, rounded
from loopwm.records.errors import InputError
from loopwm.records.files import read_json, write_json

STUDIES = ("ablate", "deferral", "depth", "halting", "looping", "twisted accuracy")
"""Studies with a picture."""


@dataclass(frozen=True)
class PictureStore:
    """All stored results by kind. claims: statements of the papers and the verdicts found here."""

    runs: tuple[Result, ...]
    studies: tuple[Result, ...]
    rollouts: tuple[Result, ...]
    agents: tuple[Result, ...]
    searches: tuple[Result, ...]
    policies: tuple[Result, ...]
    acceptances: tuple[Result, ...]
    loads: tuple[Result, ...]
    claims: tuple[Result, ...]
    trusts: Mapping[str, tuple[Probabilities, Right]]
    """By suite, for the shipped checkpoint: trust in each prediction, and whether it is exactly right."""


def read_pictures(data: Path) -> PictureStore:
    """Read everything in the folder of the results page. Raises InputError without results."""
    others = {kind: tuple(read_json(path) for path in sorted((data / kind).glob("*.json"))) for kind in KINDS}
    claims = data / "claims.json"
    predictions = {suite: data / FOLDER / f"{suite}--observed--{SHIPPED_NAME}{SUFFIX}" for suite in SUITE_TITLES}
    return PictureStore(
        read_store(data),
        **others,
        claims=tuple({**c, "verdict": verdict(c, data)} for c in (read_json(claims) if claims.is_file() else ())),
        trusts={suite: trusts_and_exact(path) for suite, path in predictions.items() if path.is_file()},
    )


def keep(folder: Path, data: Path) -> None:
    """Store the results of a finished run, replacing an earlier one of the same name.

    Raises InputError for one that is not finished, or of an unknown kind or study.
    """
    path = folder / "results.json"
    if not path.is_file():
        raise InputError(f"{folder}: must be finished, with a results.json")
    results = read_json(path)
    kind = next((kind for kind, (mark, _) in KINDS.items() if mark in results), None)
    if kind is None:
        raise InputError(f"{path}: must have one of the keys {', '.join(mark for mark, _ in KINDS.values())}")
    if kind == "studies" and results["study"] not in STUDIES:
        raise InputError(f"{path}: study: must be one of {', '.join(STUDIES)}, got {results['study']}")
    name, result = KINDS[kind][1](results)
    known = ("command", "commit", "commits", "model_sha256")
    source = {name: results["provenance"][name] for name in known if name in results["provenance"]}
    write_json(data / kind / f"{name}.json", rounded({**result, **source}))


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
    """Return final scores of 0 to 100, steps, refusals and games lost by arm, the model's arm last in `differences`."""
    provenance = results["provenance"]
    return f"look-ahead--{provenance['model_sha256'][:8]}", {
        "split": provenance["split"],
        "n": results["n"],
        "arms": {
            arm: {**row["score"], "lost": row["lost"]["mean"], **{name: row[name] for name in ("refused", "steps")}}
            for arm, row in results["arms"].items()
        },
        "differences": [
            {"a": d["a"], "b": d["b"], **d["score"], **{name: d[name] for name in ("lost", "refused", "steps")}}
            for d in results["differences"]
        ],
    }


def _search(results: Row) -> tuple[str, dict[str, Any]]:
    """Return real steps and per cent won by arm, differences of the model from the others, and steps of each game."""
    provenance = results["provenance"]
    rows = {name: results[name] for name in ("n", "arms", "differences", "game_steps")}
    return f"alfworld--{provenance['model_sha256'][:8]}", {"split": provenance["split"], **rows}


def _policy(results: Row) -> tuple[str, dict[str, Any]]:
    """Return real steps and per cent won by arm, their differences, of each game too, and games won by task."""
    provenance = results["provenance"]
    rows = {name: results[name] for name in ("n", "demonstrations", "arms", "difference", "by_game", "tasks")}
    settings = {name: provenance[name] for name in ("split", "seed", "rounds")}
    return f"alfworld--{provenance['model_sha256'][:8]}--seed-{provenance['seed']}", {**settings, **rows}


def _acceptance(results: Row) -> tuple[str, dict[str, Any]]:
    """Return figures of the acceptance head, alone and with the text, over the states of a file."""
    provenance = results["provenance"]
    rows = {name: results[name] for name in ("head", "head_and_text")}
    settings = {"file": provenance["states"], "states": results["states"], "games": results["games"]}
    return f"{provenance['states'].split('.')[0]}--{provenance['model_sha256'][:8]}", {**settings, **rows}


def _load(results: Row) -> tuple[str, dict[str, Any]]:
    return results["model"], {name: results[name] for name in ("model", "load", "roof")}


KINDS: dict[str, tuple[str, Callable[[Row], tuple[str, dict[str, Any]]]]] = {
    "studies": ("study", _study),
    "rollouts": ("latent_minus_fed_back", _rollout),
    "agents": ("task_scores", _agents),
    "searches": ("game_steps", _search),
    "policies": ("demonstrations", _policy),
    "acceptances": ("head_and_text", _acceptance),
    "loads": ("load", _load),
}
"""By folder: the key that only its results.json has, and the name and content of the stored file."""
