"""Compare looks at the real environment every few steps with looks where the model does not trust what it imagines.

Recorded episodes are imagined by their own actions. A look replaces what was imagined since the look before by what was
recorded (`lab/agents/anchored.py`). An agent is misled at a step that it does not look at and that is not exactly
right. Schedules of both kinds, of more and fewer looks, are compared by the share of steps that mislead.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from eval.models.checkpoint import CheckpointPredictor
from eval.scores.intervals import RESAMPLES, SEED
from eval.scores.metrics import exact_match
from eval.scores.tables import percent, table
from lab.agents.anchored import AnchoredWorlds
from lab.studies.trust_outside import evenly
from loopwm.records.command import positive
from loopwm.records.episodes import Episode, Step, recorded_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import write_json
from loopwm.records.provenance import provenance
from loopwm.records.template import Context
from loopwm.worlds.local import LocalWorlds

EXAMPLE = "python -m lab anchoring --episodes data/episodes/alfworld-dev-noisy --limit 40 --out runs/anchoring.json"
NEVER = 10**6
FIXED, TRUSTED = (2, 3, 5, 10), (1e-6, 1e-4, 1e-3, 0.01, 0.1, 0.3, 0.6, 0.9)


@dataclass(frozen=True)
class Schedule:
    """Steps between looks, and trust below which a look is due."""

    every: int = NEVER
    least_trust: float = 0.0

    @property
    def name(self) -> str:
        return f"every {self.every}" if self.every != NEVER else f"trust below {self.least_trust}"


SCHEDULES = (*(Schedule(every) for every in FIXED), *(Schedule(least_trust=bound) for bound in TRUSTED))


class Recorded:
    """An episode as a real environment: it answers with what was recorded, whatever the action."""

    def __init__(self, episode: Episode) -> None:
        self._before, self._future = episode.steps[0], iter(episode.steps[1:])

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        before, now = self._before, next(self._future)
        self._before = now
        return now.observation, now.score - before.score, now.done, False, {}


def imagine(worlds: LocalWorlds, episode: Episode, steps: Sequence[Step], schedule: Schedule) -> tuple[int, int]:
    """Return how many of an episode's steps are looked at, and how many mislead."""
    anchored = AnchoredWorlds(worlds, [Recorded(episode)], schedule.every, schedule.least_trust)
    anchored.begin([Context(episode.goal, episode.steps[0].observation)])
    looks = misled = 0
    for step in steps:
        (shown,) = anchored.step([step.action or ""])
        looks += anchored.real
        misled += not anchored.real and exact_match(shown.observation, step.observation) != 1
    return looks, misled


def looks_at(error: float, looks: Sequence[float], errors: Sequence[float]) -> float:
    """Return the share of looks at which a kind of schedule misleads so often, between its schedules linearly."""
    order = np.argsort(errors)
    return float(np.interp(error, np.take(errors, order), np.take(looks, order)))


def summarize(counts: Mapping[str, Sequence[tuple[int, int]]], sizes: Sequence[int], every: int) -> dict[str, Any]:
    """Compare schedules, and the looks by trust with those of every few steps where both mislead as often.

    Args:
        counts: looks and misled steps of each episode, by the name of the schedule.
        sizes: steps of each episode.
        every: steps between the looks to compare with.

    Returns:
        shares of looks and of steps that mislead by schedule, and "ratio": looks by trust over looks every few steps,
        with 95 % bounds over episodes
    """
    whole = np.ones(len(sizes))
    weights = np.random.default_rng(SEED).multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), size=RESAMPLES)
    rows = {name: _shares(values, sizes, whole) for name, values in counts.items()}
    ratios = [_ratio({name: _shares(values, sizes, w) for name, values in counts.items()}, every) for w in weights]
    return {
        "episodes": len(sizes),
        "steps": sum(sizes),
        "rows": {name: {"looks": looks, "misled": misled} for name, (looks, misled) in rows.items()},
        "ratio": {"every": every, "mean": _ratio(rows, every), "ci95": np.percentile(ratios, [2.5, 97.5]).tolist()},
    }


def _shares(values: Sequence[tuple[int, int]], sizes: Sequence[int], weights: Any) -> tuple[float, float]:
    looks, misled = (weights @ np.array(values) / (weights @ np.array(sizes))).tolist()
    return looks, misled


def _ratio(rows: Mapping[str, tuple[float, float]], every: int) -> float:
    looks, misled = rows[Schedule(every).name]
    trusted = [rows[schedule.name] for schedule in SCHEDULES if schedule.every == NEVER]
    return looks_at(misled, [row[0] for row in trusted], [row[1] for row in trusted]) / looks


def render(results: Mapping[str, Any]) -> str:
    rows = [[name, percent(row["looks"]), percent(row["misled"])] for name, row in results["rows"].items()]
    ratio = results["ratio"]
    low, high = ratio["ci95"]
    line = (
        f"\nWhere as many steps mislead as with a look every {ratio['every']} steps, trust needs {ratio['mean']:.2f} "
    )
    return table(["Look", "looks, %", "misled, %"], rows) + line + f"({low:.2f} to {high:.2f}) of the looks.\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--episodes", type=Path, nargs="+", required=True, metavar="FILE", help="episodes to imagine")
    add("--out", type=Path, required=True, help="JSON file of the results")
    add("--model", type=Path, default=Path("loopwm/pretrained"), help="checkpoint folder (default: %(default)s)")
    add("--limit", type=positive, default=40, help="episodes (default: %(default)s)")
    add("--steps", type=positive, default=30, help="most steps of each (default: %(default)s)")
    add("--every", type=int, choices=FIXED, default=5, help="schedule to compare with (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    predictor = CheckpointPredictor(args.model)
    worlds = LocalWorlds(predictor.world_model, predictor.depth)
    episodes = [episode for episode in recorded_episodes(args.episodes) if len(episode.steps) > 1]
    if len(episodes) < 2:
        raise InputError("--episodes: must hold at least two episodes with a step")
    chosen = evenly(episodes, args.limit)  # of all tasks, which stand in order
    played = [episode.steps[1 : args.steps + 1] for episode in chosen]
    counts = {
        schedule.name: [
            imagine(worlds, episode, steps, schedule)
            for episode, steps in tqdm(list(zip(chosen, played, strict=True)), desc=schedule.name, unit="episode")
        ]
        for schedule in SCHEDULES
    }
    results = summarize(counts, [len(steps) for steps in played], args.every)
    names = [path.name for path in args.episodes]
    spec = {"limit": args.limit, "steps": args.steps, "episodes": names, **predictor.identity}
    write_json(args.out, {**results, "provenance": {**spec, **provenance("lab")}})
    print(render(results), end="")
