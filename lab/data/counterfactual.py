"""Cut pairs of windows that differ in one earlier action, and therefore in the answer to the last action.

A pair shares everything up to now. The second window replaces one of the actions before the last by another valid one
or by a look; the simulator gives the observations. Ids end in `/fact` and `/counterfact`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from data_prep.environments import make_environment
from data_prep.environments.base import Environment
from data_prep.policies import random_action, replay
from data_prep.windows import write_windows
from lab.data.cut_suite import read_windows
from loopwm.records.episodes import Step
from loopwm.records.errors import InputError

EXAMPLE = (
    "python -m lab counterfactual --windows eval/suites/scienceworld-500.jsonl.gz --count 200 "
    "--out eval/suites/scienceworld-counterfactual.jsonl.gz"
)

TRIES = 4
"""Changes tried on a window before the next window."""


def counterfact(environment: Environment, window: Mapping[str, Any], rng: Random) -> dict[str, Any] | None:
    """Return the window with one action before the last changed, or None if the last observation stays the same.

    Raises InputError if the simulator does not reproduce the window's history.
    """
    history = [Step(step["action"], step["observation"], 0, False) for step in window["history"]]
    *_, now = replay(environment, window["task"], window["variation"], history)
    changed = rng.randrange(len(window["actions"]) - 1)
    steps: list[Step] = []
    for index, action in enumerate(window["actions"]):
        played = _other_action(environment, action, rng) if index == changed else action
        steps.append(environment.step(played))
    if steps[-1].observation == window["observations"][-1]:
        return None
    scores = [step.score for step in (now, *steps)]
    return {
        **window,
        "actions": [step.action for step in steps],
        "observations": [step.observation for step in steps],
        "rewards": [after - before for before, after in pairwise(scores)],
        "dones": [step.done for step in steps],
    }


def _other_action(environment: Environment, action: str, rng: Random) -> str:
    """Return a valid action in its place, or, half of the time, a look."""
    while True:
        other = rng.choice((environment.looks[0], random_action(environment, rng)))
        if other != action:
            return other


def pairs(
    environment: Environment, windows: Sequence[Mapping[str, Any]], seed: int, name: str
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield pairs of the windows that can be changed, in a seeded order."""
    order = list(windows)
    Random(f"{seed}/{name}").shuffle(order)
    for window in order:
        rng = Random(f"{seed}/{name}/{window['id']}")
        for _ in range(TRIES):
            other = counterfact(environment, window, rng)
            if other is not None:
                place = f"{name}/{window['id']}"
                yield {**window, "id": f"{place}/fact"}, {**other, "id": f"{place}/counterfact"}
                break


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--windows", type=Path, required=True, help="windows of one environment")
    parser.add_argument("--count", type=int, default=200, help="pairs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="NAME.jsonl.gz; NAME begins the windows' ids")


def run(args: argparse.Namespace) -> None:
    if args.count < 1:
        raise InputError("--count: must be >= 1")
    windows = read_windows(args.windows)
    name = args.out.name.split(".")[0]
    cut: list[dict[str, Any]] = []
    with closing(make_environment(windows[0]["env"])) as environment, tqdm(total=args.count, unit="pair") as bar:
        for pair in pairs(environment, [w for w in windows if len(w["actions"]) > 1], args.seed, name):
            cut += pair
            bar.update()
            if len(cut) == 2 * args.count:
                break
        else:
            raise InputError(f"{args.windows}: found {len(cut) // 2} pairs, --count is {args.count}")
    write_windows(args.out, cut)
