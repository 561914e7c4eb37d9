"""Measure how well a model foresees the steps that lose an episode, among those that change the score.

Steps are those of a verb that may end an episode (`data_prep.policies.FATAL`), in recorded episodes: the policy `fatal`
ends in its misuses, the solutions hold its uses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from data_prep.policies import FATAL
from eval.scores.rows import detection
from loopwm import load
from loopwm.records.episodes import Episode, recorded_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import write_json
from loopwm.records.template import Context, Transition
from loopwm.worlds.planning import LOSS, risk
from loopwm.worlds.protocol import Worlds

EXAMPLE = "python -m lab losses --episodes data/episodes/scienceworld-dev-fatal data/episodes/scienceworld-dev-gold"
LONGEST = 60
"""Most steps before the one that is judged."""


class Turn(NamedTuple):
    """Step that changed the score, and what was seen before."""

    task: str
    context: Context
    action: str
    lost: bool


def turns(episodes: Iterable[Episode]) -> Iterator[Turn]:
    """Yield the steps of fatal verbs that changed the score."""
    for episode in episodes:
        steps = episode.steps
        history = tuple(Transition(step.action or "", step.observation) for step in steps[1:])
        for place in range(1, min(len(steps), LONGEST + 1)):
            action, change = steps[place].action or "", steps[place].score - steps[place - 1].score
            if change and action.startswith(FATAL):
                context = Context(episode.goal, steps[0].observation, history[: place - 1])
                yield Turn(episode.task, context, action, change < 0)


def foresees_loss(worlds: Worlds, turn: Turn) -> bool:
    """Return True if the model imagines that the action loses points."""
    worlds.begin([turn.context])
    return risk(worlds.step([turn.action], decode=False)[0]) == LOSS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=Path("loopwm/pretrained"), help="checkpoint folder")
    parser.add_argument("--episodes", type=Path, nargs="+", required=True, help="episode files or folders")
    parser.add_argument("--out", type=Path, help="file of the results")


def run(arguments: argparse.Namespace) -> None:
    """Print precision and recall of losses, overall and by task. Raises InputError."""
    places = sorted(turns(recorded_episodes(arguments.episodes)), key=lambda turn: turn.task)
    if not places:
        raise InputError(f"--episodes: must hold a {FATAL[0]!r} that changed the score, found none")
    worlds = load(arguments.model)
    judged = [(turn.task, (foresees_loss(worlds, turn), turn.lost)) for turn in tqdm(places, unit="step")]
    result: dict[str, Any] = {"steps": len(judged), "lost": detection([pair for _, pair in judged])}
    result["tasks"] = {
        task: detection([pair for _, pair in group]) for task, group in groupby(judged, key=lambda row: row[0])
    }
    print(json.dumps(result, indent=1))
    if arguments.out is not None:
        write_json(arguments.out, result)
