"""Human-normalised scores of Atari 100k: mean, median, interquartile mean and optimality gap (Agarwal et al. 2021).

    score of a run = (return - random) / (human - random)

Mean and median are over games, of each game's mean over runs; the interquartile mean is over all runs, without the
lowest and the highest quarter; the gap is the mean distance of runs below 1.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwm.records.errors import InputError

TABLE = Path(__file__).with_name("atari100k.json")
FAMILY = "atari/"
RESAMPLES = 2000


def normalised(game: str, score: float) -> float:
    """Normalise a return. Raises InputError for a game that is not one of the 26."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    if game not in table:
        raise InputError(f"game: must be one of the {len(table)} games of Atari 100k, got {game}")
    low, high = table[game]["random"], table[game]["human"]
    return float((score - low) / (high - low))


def interquartile_mean(scores: NDArray[np.float64]) -> float:
    """Return the mean without the lowest and the highest quarter, rounded down to whole scores."""
    ordered, cut = np.sort(scores, axis=None), scores.size // 4
    return float(ordered[cut : scores.size - cut].mean())


def aggregate(scores: NDArray[np.float64]) -> dict[str, float]:
    """Aggregate scores (runs, games)."""
    by_game = scores.mean(0)
    return {
        "mean": float(by_game.mean()),
        "median": float(np.median(by_game)),
        "iqm": interquartile_mean(scores),
        "optimality_gap": float(np.maximum(0, 1 - scores).mean()),
    }


def intervals(scores: NDArray[np.float64], seed: int) -> dict[str, list[float]]:
    """Return 95 % intervals by rliable's stratified bootstrap over runs. Raises InputError if it is not installed."""
    try:
        from rliable import library
    except ModuleNotFoundError as error:
        raise InputError(
            f"--intervals: the package {error.name} is not installed: pip install 'loopwm[rliable]'"
        ) from error
    names = list(aggregate(scores))
    _, estimates = library.get_interval_estimates(
        {"agent": scores},
        lambda x: np.array([aggregate(x)[name] for name in names]),
        reps=RESAMPLES,
        random_state=np.random.RandomState(seed),
    )
    return {name: estimates["agent"][:, i].tolist() for i, name in enumerate(names)}


def read_return(path: Path) -> tuple[str, float]:
    """Read game and mean return of a file written by `lab pixels play`. Raises InputError naming file and field."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        environment, score = str(record["environment"]), float(record["agent"]["mean_return"])
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not written by `lab pixels play` ({error})") from error
    if not environment.startswith(FAMILY):
        raise InputError(f"{path}: environment: must begin with {FAMILY}, got {environment!r}")
    return environment.removeprefix(FAMILY), score


def measure(paths: list[Path], with_intervals: bool, seed: int) -> dict[str, Any]:
    """Aggregate the files.

    Raises InputError for unreadable files, one given twice, and games with different numbers of runs.
    """
    for path, count in Counter(path.resolve() for path in paths).items():
        if count > 1:
            raise InputError(f"{path}: must be given once, got it {count} times")
    games: dict[str, list[float]] = {}
    for path in paths:
        game, score = read_return(path)
        games.setdefault(game, []).append(score)
    if len({len(runs) for runs in games.values()}) > 1:
        counts = ", ".join(f"{game} {len(runs)}" for game, runs in games.items())
        raise InputError(f"runs: must be the same number for each game, got {counts}")
    scores = np.array([[normalised(game, score) for score in runs] for game, runs in games.items()]).T
    rows = [
        {"game": game, "runs": len(runs), "return": float(np.mean(runs)), "normalised": float(scores[:, i].mean())}
        for i, (game, runs) in enumerate(games.items())
    ]
    results: dict[str, Any] = {"rows": rows, "overall": aggregate(scores)}
    return results | ({"ci95": intervals(scores, seed)} if with_intervals else {})
