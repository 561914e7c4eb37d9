"""Beam search by imagined rewards, a few actions before the win of ALFWorld's episodes, played in the real game.

From each place a plan of at most as many actions as the expert had left is searched among the commands that the
observations allow (`loopwm.worlds.planning.beam_search`), and followed without looking. Arms:

    rules   the hand-written searcher, which sees each real observation and has as many steps; no model
    greedy  the one plan that is surest at each step: a beam of one
    beam    the plan with the most expected points

Rerun the command to resume.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tqdm import tqdm

from eval.models.checkpoint import CheckpointPredictor
from eval.scores.predictions import PredictionFolder, drop_torn_line
from eval.scores.tables import table
from lab.agents.latent_policy import actions_in_reach
from lab.agents.play import PLAYS, replay, won
from lab.agents.real_world import Game, RealWorld
from lab.agents.searcher import Searcher
from lab.episodes import episodes_hash
from lab.estimates import estimate, over_runs
from lab.studies.search import listed
from loopwm.records.command import positive
from loopwm.records.episodes import Episode, recorded_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import read_json_lines, write_atomic, write_json
from loopwm.records.provenance import provenance
from loopwm.records.template import Context, Transition
from loopwm.worlds.local import LocalWorlds
from loopwm.worlds.planning import beam_search
from loopwm.worlds.protocol import longer

EXAMPLE = "python -m lab beam --episodes data/episodes/alfworld-dev-expert --out runs/beam-dev"
ARMS = ("rules", "greedy", "beam")
MOST_DECODED = 100

Planner = Callable[[RealWorld, Game, Context, int], list[str]]
"""Returns actions to take in a game from a context on, at most a number."""


def searched(worlds: LocalWorlds, width: int, world: RealWorld, game: Game, context: Context, count: int) -> list[str]:
    """Return the actions of the plan that a beam search finds in imagination."""

    def propose(steps: Sequence[Transition]) -> list[str]:
        now = context
        for step in steps:
            now = longer(now, step.action, step.observation)
        return actions_in_reach(now)

    worlds.begin([context])
    return [step.action for step in beam_search(worlds, propose, width, count).steps]


def by_rules(world: RealWorld, game: Game, context: Context, count: int) -> list[str]:
    """Return the actions of the hand-written searcher, which plays the real game on."""
    agent, actions = Searcher(listed), list[str]()
    replay(world, game, [step.action for step in context.history])
    while len(actions) < count and (action := agent.act(context)) is not None:
        step = world.step(action)
        actions.append(action)
        if step.done:
            break
        context = longer(context, action, step.observation)
    return actions


def place_before_win(episode: Episode, count: int) -> Context | None:
    """Return the context `count` actions before the episode's win, None for a shorter one."""
    first, *steps = episode.steps
    if len(steps) < count:
        return None
    history = [Transition(step.action or "", step.observation) for step in steps[: len(steps) - count]]
    return Context(episode.goal, first.observation, tuple(history))


def measure(
    world: RealWorld, planners: Mapping[str, Planner], episodes: Sequence[Episode], counts: Sequence[int], out: Path,
    spec: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Play what is missing from `out`, write the results and return them."""
    folder = PredictionFolder(out, dict(spec))
    path = out / PLAYS
    plays = _read_plays(path)
    places = [(episode, count) for count in counts for episode in episodes]
    names = list[str]()
    for episode, count in tqdm(places, unit="place"):
        game, context = Game(episode.task, episode.variation or 0), place_before_win(episode, count)
        name = f"{count}/{game.name}"
        if context is None:
            continue
        names.append(name)
        if name not in plays:
            plays[name] = {"place": name, "task": game.task, "count": count}
            for arm, plan in planners.items():
                actions = world.robustly(game, partial(plan, world, game, context, count))
                history = [step.action for step in context.history]
                play = world.robustly(game, partial(replay, world, game, [*history, *actions]))
                plays[name][arm] = {"actions": actions, "won": won(play)}
            folder.add_lines(PLAYS, [plays[name]])
    results = make_results([plays[name] for name in names], counts, spec)
    write_json(out / "results.json", results)
    write_atomic(out / "report.md", render(results))
    return results


def _read_plays(path: Path) -> dict[str, dict[str, Any]]:
    """Read the plays so far by place and drop a torn last line."""
    if not path.exists():
        return {}
    drop_torn_line(path)
    return {line["place"]: line for _, line in read_json_lines(path)}


def make_results(plays: Sequence[Mapping[str, Any]], counts: Sequence[int], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Build results.json: by number of actions left, how often each arm wins, and how often a beam that plans does."""
    rows = {}
    for count in counts:
        some = [play for play in plays if play["count"] == count]
        by_arm = {arm: [100.0 * play[arm]["won"] for play in some] for arm in ARMS}
        planned = np.array([100.0 * play["beam"]["won"] for play in some if play["beam"]["actions"]])
        rows[str(count)] = {
            "n": len(some),
            **over_runs([{"won": by_arm}]),
            "planned": {"n": len(planned), **(estimate(planned) if len(planned) else {})},
        }
    return {"rows": rows, "provenance": {**spec, **provenance("lab")}}


def render(results: Mapping[str, Any]) -> str:
    """Render report.md."""
    lines = []
    for count, row in results["rows"].items():
        won_cells = [_cell(row["arms"][arm]["won"]) for arm in ARMS]
        planned = row["planned"]
        lines.append([count, str(row["n"]), *won_cells, f"{planned['n']}: {_cell(planned) if planned['n'] else '-'}"])
    header = ["actions before the win", "n", *(f"{arm}, won %" for arm in ARMS), "where beam has a plan"]
    return "# Beam search before the win, ALFWorld\n\n" + table(header, lines)


def _cell(estimated: Mapping[str, Any]) -> str:
    low, high = estimated["ci95"]
    return f"{estimated['mean']:.1f} ({low:.1f} to {high:.1f})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--episodes", type=Path, nargs="+", required=True, metavar="FILE", help="episodes that end in a win")
    add("--out", type=Path, required=True, help="folder of the results")
    add("--model", type=Path, default=Path("loopwm/pretrained"), help="checkpoint folder (default: %(default)s)")
    add("--before", type=positive, nargs="+", default=[1, 2, 3], help="actions before the win (default: 1 2 3)")
    add("--width", type=positive, default=8, help="plans continued at each depth (default: %(default)s)")
    add("--limit", type=positive, help="a sample of so many episodes (default: all)")
    add("--seed", type=int, default=0, help="seed of the sample (default: 0)")


def run(args: argparse.Namespace) -> None:
    predictor = CheckpointPredictor(args.model)
    worlds = LocalWorlds(predictor.world_model, predictor.depth, MOST_DECODED, greedy=True)
    episodes = [one for one in recorded_episodes(args.episodes) if one.env == "alfworld" and one.steps[-1].done]
    if not episodes:
        raise InputError("--episodes: must hold episodes of ALFWorld that end in a win")
    settings = {name: vars(args)[name] for name in ("before", "width", "limit", "seed")}
    spec = {**settings, **predictor.identity, "episodes": [path.name for path in args.episodes]}
    spec["episodes_sha256"] = episodes_hash(episodes)
    Random(args.seed).shuffle(episodes)
    planners: dict[str, Planner] = {
        "rules": by_rules,
        "greedy": partial(searched, worlds, 1),
        "beam": partial(searched, worlds, args.width),
    }
    with RealWorld("alfworld") as world:
        measure(world, planners, episodes[: args.limit], args.before, args.out, spec)
    print((args.out / "report.md").read_text(encoding="utf-8"), end="")
