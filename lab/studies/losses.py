"""Measure how well a model foresees the steps that lose an episode, among those that change the score.

Steps are those of a verb that may end an episode (`data_prep.policies.FATAL`), in recorded episodes: the policy `fatal`
ends in its misuses, the policy `focus` uses what is not there, too, and the solutions hold its uses. What each use is
taken for, paid, lost or neither, is counted beside what it was.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from data_prep.policies import FATAL
from eval.scores.rows import detection
from lab.studies.focus_rows import OUTCOMES, outcome_of
from loopwm import load
from loopwm.records.episodes import Episode, recorded_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import write_json
from loopwm.records.template import Context, Transition
from loopwm.worlds.planning import LOSS, risk
from loopwm.worlds.protocol import Imagined, Worlds

EXAMPLE = "python -m lab losses --episodes data/episodes/scienceworld-dev-fatal data/episodes/scienceworld-dev-gold"
LONGEST = 60
"""Most steps before the one that is judged."""


class Turn(NamedTuple):
    """Use of a fatal verb, its outcome (`OUTCOMES`), and what was seen before."""

    task: str
    context: Context
    action: str
    outcome: str


def turns(episodes: Iterable[Episode]) -> Iterator[Turn]:
    """Yield the uses of fatal verbs that changed the score or named what is not there."""
    for episode in episodes:
        steps = episode.steps
        history = tuple(Transition(step.action or "", step.observation) for step in steps[1:])
        for place, (before, step) in enumerate(pairwise(steps[: LONGEST + 1])):
            if outcome := outcome_of(before, step):
                context = Context(episode.goal, steps[0].observation, history[:place])
                yield Turn(episode.task, context, step.action or "", outcome)


def imagined(worlds: Worlds, turn: Turn) -> Imagined:
    worlds.begin([turn.context])
    return worlds.step([turn.action], decode=False)[0]


def taken_for(step: Imagined) -> str:
    """Return which outcome a step's most likely reward tells: more than half a point, or less, or neither."""
    reward = step.reward or 0.0
    return "paid" if reward > 0.5 else "lost" if reward < -0.5 else "neither"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=Path("loopwm/pretrained"), help="checkpoint folder")
    parser.add_argument("--episodes", type=Path, nargs="+", required=True, help="episode files or folders")
    parser.add_argument("--out", type=Path, help="file of the results")


def run(arguments: argparse.Namespace) -> None:
    """Print precision and recall of losses, overall and by task. Raises InputError."""
    places = sorted(turns(recorded_episodes(arguments.episodes)), key=lambda turn: turn.task)
    if all(turn.outcome == "absent" for turn in places):
        raise InputError(f"--episodes: must hold a {FATAL[0]!r} that changed the score, found none")
    worlds = load(arguments.model)
    uses = [(use, imagined(worlds, use)) for use in tqdm(places, unit="step")]
    judged = [(use.task, (risk(step) == LOSS, use.outcome == "lost")) for use, step in uses if use.outcome != "absent"]
    result: dict[str, Any] = {"steps": len(judged), "lost": detection([pair for _, pair in judged])}
    taken = Counter((use.outcome, taken_for(step)) for use, step in uses)
    result["taken_for"] = {was: {name: n for (of, name), n in taken.items() if of == was} for was in OUTCOMES}
    result["tasks"] = {
        task: detection([pair for _, pair in group]) for task, group in groupby(judged, key=lambda row: row[0])
    }
    print(json.dumps(result, indent=1))
    if arguments.out is not None:
        write_json(arguments.out, result)
