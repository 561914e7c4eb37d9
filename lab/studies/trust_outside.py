"""Measure the trust of answers where action, history, text or memory do not belong to a model's world.

One action after noisy dev windows of both worlds, and after the same windows with one thing exchanged:

    own            as recorded
    other-action   an action of the other world
    other-history  first observation and history of the other world, under the window's goal
    other-game     first observation and history of another game of the same world
    foreign        goal and first observation of an environment that no training data has (`lab foreign-contexts`)
    memory         as recorded, with outcomes recalled from train episodes of its world
    other-memory   the same, from train episodes of the other world

The simulator's answer is known where the context is as recorded: there exact match stands beside trust.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from eval.models.checkpoint import checkpoint_hash
from eval.scores.intervals import fraction_interval95
from eval.scores.metrics import exact_match
from eval.scores.suites import load_suite
from eval.scores.tables import table
from lab.data.foreign_contexts import foreign_starts
from loopwm import load
from loopwm.records.command import positive
from loopwm.records.errors import InputError
from loopwm.records.files import PACKAGED, write_json
from loopwm.records.provenance import provenance
from loopwm.records.template import Context, window_context
from loopwm.records.windows import Window, game_of
from loopwm.worlds.protocol import Worlds

EXAMPLE = (
    "python -m lab trust-outside --memory scienceworld=data/episodes/scienceworld-gold "
    "alfworld=data/episodes/alfworld-train-expert"
)
SUITES = {"scienceworld": "scienceworld-dev-noisy", "alfworld": "alfworld-dev-noisy"}
TOGETHER = 10
HIGH = 0.9

T = TypeVar("T")


class Case(NamedTuple):
    """A context, one action, and what the simulator says, if known."""

    game: str
    context: Context
    action: str
    reference: str | None


def cases(own: Sequence[Window], other: Sequence[Window]) -> dict[str, list[Case]]:
    """Return the cases of each condition but memory. own, other: windows of two worlds; the i-th are combined."""
    foreign = foreign_starts()
    conditions: dict[str, list[Case]] = {}
    for i, window in enumerate(own):
        game, context, action = game_of(window), window_context(window, "observed"), window["actions"][0]
        stranger = window_context(other[i % len(other)], "observed")
        neighbour = window_context(_of_another_game(own, i), "observed")
        far = foreign[i * len(foreign) // len(own)]
        for condition, case in (
            ("own", Case(game, context, action, window["observations"][0])),
            ("other-action", Case(game, context, other[i % len(other)]["actions"][0], None)),
            ("other-history", Case(game, replace(stranger, goal=window["goal"]), action, None)),
            ("other-game", Case(game, replace(neighbour, goal=window["goal"]), action, None)),
            ("foreign", Case(game, Context(far["goal"], far["observation"]), action, None)),
        ):
            conditions.setdefault(condition, []).append(case)
    return conditions


def _of_another_game(windows: Sequence[Window], i: int) -> Window:
    """Return the next window of another game. Raises InputError if there is none."""
    for window in (*windows[i:], *windows[:i]):
        if game_of(window) != game_of(windows[i]):
            return window
    raise InputError("--limit: must leave windows of two games")


def measure(worlds: Worlds, some: Sequence[Case], together: int) -> dict[str, Any]:
    """Return mean trust, the share of high trust and, where it is known what happens, exact match; with bounds.

    An observation that does not end has no trust, and counts as 0. together: cases that are imagined at once.
    """
    trusts, exact, references = list[float](), list[float](), [case.reference for case in some]
    for start in tqdm(range(0, len(some), together), unit="batch"):
        batch = some[start : start + together]
        worlds.begin([case.context for case in batch])
        for case, step in zip(batch, worlds.step([case.action for case in batch]), strict=True):
            trusts.append(step.trust or 0.0)
            exact.append(exact_match(step.observation, case.reference or ""))
    values = np.array([trusts, [float(trust >= HIGH) for trust in trusts], exact]).T
    bounds = fraction_interval95(values, [case.game for case in some])
    names = ("trust", "high", "exact") if None not in references else ("trust", "high")
    figures = {name: {"mean": values[:, i].mean(), "ci95": bounds[:, i].tolist()} for i, name in enumerate(names)}
    return {"n": len(some), **figures}


def render(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Render a table a world, percent."""
    text = ""
    for env, rows in results.items():
        cells = [
            [name, str(row["n"]), *(_cell(row.get(key)) for key in ("trust", "high", "exact"))]
            for name, row in rows.items()
        ]
        text += f"\n{env}\n\n" + table(["Condition", "n", "trust", f"trust of {HIGH} or more", "exactly right"], cells)
    return text


def _cell(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return "-"
    mean, (low, high) = figure["mean"], figure["ci95"]
    return f"{100 * mean:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, default=PACKAGED, help="checkpoint folder (default: the shipped one)")
    add("--memory", nargs="+", default=[], metavar="WORLD=FILE", help="train episodes of each world, to recall from")
    add("--limit", type=positive, default=100, help="windows of each world (default: %(default)s)")
    add("--out", type=Path, help="file of the results")


def run(arguments: argparse.Namespace) -> None:
    """Measure and print. Raises InputError."""
    memories = read_memories(arguments.memory)
    windows = {env: evenly(load_suite(suite).windows, arguments.limit) for env, suite in SUITES.items()}
    results: dict[str, dict[str, Any]] = {}
    plain = load(arguments.model)
    recalling = {env: load(arguments.model, memory=[path]) for env, path in memories.items()}
    for env, other in (("scienceworld", "alfworld"), ("alfworld", "scienceworld")):
        conditions = cases(windows[env], windows[other])
        results[env] = {name: measure(plain, some, TOGETHER) for name, some in conditions.items()}
        for name, source in (("memory", env), ("other-memory", other)):
            if source in recalling:
                results[env][name] = measure(recalling[source], conditions["own"], TOGETHER)
    print(render(results))
    if arguments.out is not None:
        settings = {"model_sha256": checkpoint_hash(arguments.model), "limit": arguments.limit}
        write_json(arguments.out, {"worlds": results, "provenance": settings | provenance("lab")})


def read_memories(pairs: Sequence[str]) -> dict[str, Path]:
    """Parse WORLD=FILE. Raises InputError."""
    memories = {}
    for pair in pairs:
        env, sign, path = pair.partition("=")
        if env not in SUITES or not sign:
            raise InputError(f"--memory: must be WORLD=FILE with a world of {', '.join(SUITES)}, got {pair!r}")
        memories[env] = Path(path)
    return memories


def evenly(items: Sequence[T], count: int) -> list[T]:
    """Return `count` items at equal distances, all if there are fewer."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]
