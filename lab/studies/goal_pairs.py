"""Measure whether a model's rewards depend on the goal: the same steps, under the goal they reach and under others.

Episodes that were won are relabelled (`lab/data/relabel_goals.py`). ALFWorld: with goals of another thing, place, state
or count of things that their steps never reach. ScienceWorld: with the goal's two boxes exchanged, so that the last
step answers wrongly. The model imagines the last step under each: the reached goal should pay, the others should not.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from eval.scores.tables import table
from lab.agents.searcher import Goal, parse_goal
from lab.data.relabel_goals import exchanged, other_goals, reached_at, under
from loopwm import load
from loopwm.records.episodes import Episode, recorded_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import write_json
from loopwm.records.template import Context, Transition
from loopwm.worlds.protocol import Imagined, Worlds

EXAMPLE = (
    "python -m lab goal-pairs --model loopwm/pretrained --episodes data/episodes/alfworld-dev-expert "
    "data/episodes/scienceworld-dev-gold --out runs/goals"
)

PARTS = ("thing", "place", "state", "count", "box")


@dataclass(frozen=True)
class Pair:
    """An episode as it was won, and under a goal that differs in one part and is never reached."""

    part: str
    won: Episode
    missed: Episode


def changed_part(own: Goal, other: Goal) -> str | None:
    """Return the part in which two goals differ, None if they differ in several."""
    as_own = {
        "thing": replace(other, thing=own.thing),
        "place": replace(other, place=own.place),
        "state": replace(other, verb=own.verb),
        "count": replace(other, count=own.count),
    }
    return next((part for part, goal in as_own.items() if goal == own), None)


def pairs_of(episodes: Iterable[Episode], seed: int) -> Iterator[Pair]:
    """Yield one pair an episode for each part that can be changed."""
    for episode in episodes:
        if episode.env == "scienceworld":
            yield from (Pair("box", episode, missed) for missed in filter(None, [exchanged(episode)]))
            continue
        own = parse_goal(episode.goal)
        if reached_at(episode, own) != len(episode.steps) - 1:
            continue
        rng, parts = Random(f"{seed}/{episode.variation}"), set(PARTS)
        for goal in (goal for _ in range(8) for goal in other_goals(episode, rng)):
            part = changed_part(own, goal)
            if part in parts and reached_at(episode, goal) is None and (missed := under(episode, goal, rng)):
                parts.remove(part)
                yield Pair(part, episode, missed)


def last_step(worlds: Worlds, episode: Episode) -> Imagined:
    """Imagine the last step of an episode; nothing is decoded."""
    first, *steps, last = episode.steps
    history = tuple(Transition(step.action or "", step.observation) for step in steps)
    worlds.begin([Context(episode.goal, first.observation, history)])
    return worlds.step([last.action or ""], decode=False)[0]


def judge(worlds: Worlds, pairs: Iterable[Pair]) -> list[dict[str, Any]]:
    """Return for each pair whether the reached goal pays and ends, and whether the other one does."""
    rows = []
    for pair in pairs:
        win, miss = last_step(worlds, pair.won), last_step(worlds, pair.missed)
        rows.append(
            {"part": pair.part, "game": pair.won.variation, "goal": pair.missed.goal}
            | {"won_pays": _pays(win), "won_ends": win.ends, "missed_pays": _pays(miss), "missed_ends": miss.ends}
        )
    return rows


def _pays(step: Imagined) -> bool:
    return step.reward is not None and step.reward > 0


def summary(judgements: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the shares, in per cent, for each part and for all."""
    by_part: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in judgements:
        by_part[row["part"]].append(row)
        by_part["all"].append(row)
    return {part: _shares(by_part[part]) for part in (*PARTS, "all") if part in by_part}


def _shares(rows: list[Mapping[str, Any]]) -> dict[str, float]:
    kinds = ("won_pays", "won_ends", "missed_pays", "missed_ends")
    both = sum(row["won_pays"] and not row["missed_pays"] for row in rows)
    return {
        "n": len(rows),
        **{kind: 100 * sum(row[kind] for row in rows) / len(rows) for kind in kinds},
        "both_right": 100 * both / len(rows),
    }


def render(shares: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        [part, f"{row['n']:.0f}", *(f"{row[kind]:.1f}" for kind in ("won_pays", "missed_pays", "both_right"))]
        for part, row in shares.items()
    ]
    return table(["Changed", "pairs", "reached goal pays, %", "other goal pays, %", "both right, %"], rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--episodes", type=Path, nargs="+", required=True, metavar="FILE", help="of both worlds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")


def run(args: argparse.Namespace) -> None:
    """Judge the pairs. Raises InputError if no episode was won."""
    pairs = list(pairs_of(recorded_episodes(args.episodes), args.seed))
    if not pairs:
        raise InputError("--episodes: must hold episodes that were won and can be relabelled, got none")
    judgements = judge(load(args.model), tqdm(pairs, unit="pair"))
    shares = summary(judgements)
    write_json(args.out / "results.json", {"pairs": shares, "judgements": judgements})
    print(render(shares), end="")
