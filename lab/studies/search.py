"""Search: real steps of an agent of ALFWorld that looks for things where a model imagines them, and of its opponents.

`lab/agents/searcher.py` is the agent; its arms differ in the order of the places only:

    listed  as the first observation lists them; no model
    random  in a random order; no model
    table   by how often places of the kind showed the thing in train episodes; no model
    model   by how often sampled observations of places of the kind show the thing (`loopwm.worlds.planning.chances`)

`table` and `model` divide by the steps that looking takes: two where the place is expected to be closed. Rerun the
command to resume.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tqdm import tqdm

from eval.models.checkpoint import CheckpointPredictor
from eval.scores.predictions import PredictionFolder
from eval.scores.tables import table
from lab.agents.agents import is_refusal
from lab.agents.play import PLAYS, Plays, play_real, read_plays, won
from lab.agents.real_world import Game, RealWorld
from lab.agents.searcher import NAME, SHOWN, Order, Searcher, kind_of
from lab.episodes import train_only
from lab.estimates import estimate
from loopwm.records.command import positive
from loopwm.records.episodes import Episode, recorded_episodes
from loopwm.records.files import write_atomic, write_json
from loopwm.records.provenance import provenance
from loopwm.records.template import Context
from loopwm.worlds.local import LocalWorlds
from loopwm.worlds.planning import chances, imagine

EXAMPLE = (
    "python -m lab search --train-episodes data/episodes/alfworld-train-expert data/episodes/alfworld-built-expert "
    "--split dev --out runs/search-dev"
)
ARMS = ("listed", "random", "table", "model")
PLACES_A_KIND = 2
"""Places of one kind that are imagined: more say little more."""

MOST_DECODED = 100
_CLOSED = "is closed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--train-episodes", type=Path, nargs="+", required=True, metavar="FILE", help="episodes of the table")
    add("--out", type=Path, required=True, help="folder of the results")
    add("--model", type=Path, default=Path("loopwm/pretrained"), help="checkpoint folder (default: %(default)s)")
    add("--split", default="valid_seen", help="split of the games (default: %(default)s)")
    add("--max-steps", type=positive, default=60, help="environment steps of a game (default: %(default)s)")
    add("--samples", type=positive, default=12, help="sampled observations of a place (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of random orders and samples (default: 0)")


def run(args: argparse.Namespace) -> None:
    episodes = [episode for episode in recorded_episodes(args.train_episodes) if episode.env == "alfworld"]
    train_only(episodes, "--train-episodes")
    predictor = CheckpointPredictor(args.model)
    worlds = LocalWorlds(predictor.world_model, predictor.depth, MOST_DECODED)
    arms = make_arms(worlds, episodes, args.samples, args.seed)
    settings = {name: vars(args)[name] for name in ("split", "max_steps", "samples", "seed")}
    spec = {**settings, **predictor.identity, "table": Table(episodes).identity}
    with RealWorld("alfworld") as world:
        measure(world, arms, spec, args.out)
    print((args.out / "report.md").read_text(encoding="utf-8"), end="")


def listed(context: Context, kind: str, places: Sequence[str]) -> list[str]:
    return list(places)


def shuffled(seed: int, context: Context, kind: str, places: Sequence[str]) -> list[str]:
    order = sorted(places)
    Random(f"{seed}/{context.goal}/{kind}").shuffle(order)
    return order


class Table:
    """Counts, over episodes, of kinds of things by kind of place at the first look, and of places that were closed."""

    def __init__(self, episodes: Iterable[Episode]) -> None:
        self._shown, self._looks = Counter[tuple[str, str]](), Counter[str]()
        self._closed, self._visits = Counter[str](), Counter[str]()
        for episode in episodes:
            self._count(episode)

    def _count(self, episode: Episode) -> None:
        known: set[str] = set()
        for step in episode.steps[1:]:
            if visited := re.match(r"You arrive at (\w+) \d+\.", step.observation):
                self._visits[visited[1]] += 1
                self._closed[visited[1]] += _CLOSED in step.observation
            for place, things in SHOWN.findall(step.observation):
                if place not in known:
                    known.add(place)
                    self._looks[kind_of(place)] += 1
                    self._shown.update((kind_of(place), kind) for kind in set(map(kind_of, NAME.findall(things))))

    @property
    def identity(self) -> dict[str, int]:
        return {"looks": self._looks.total(), "shown": self._shown.total()}

    def __call__(self, context: Context, kind: str, places: Sequence[str]) -> list[str]:
        def worth(place: str) -> float:
            its_kind = kind_of(place)
            steps = 1 + (self._closed[its_kind] + 0.5) / (self._visits[its_kind] + 1)
            return (self._shown[its_kind, kind] + 0.01) / (self._looks[its_kind] + 1) / steps

        return sorted(places, key=worth, reverse=True)


class Imagined:
    """Order by what sampled observations show of up to PLACES_A_KIND places of each kind."""

    def __init__(self, worlds: LocalWorlds, samples: int, seed: int) -> None:
        self._worlds, self._samples, self._seed = worlds, samples, seed

    def __call__(self, context: Context, kind: str, places: Sequence[str]) -> list[str]:
        by_kind: dict[str, list[str]] = {}
        for place in places:
            by_kind.setdefault(kind_of(place), []).append(place)
        chosen = {
            its_kind: Random(f"{self._seed}/{context.goal}/{its_kind}").sample(names, min(len(names), PLACES_A_KIND))
            for its_kind, names in by_kind.items()
        }
        worth = self._worth(context, kind, [place for names in chosen.values() for place in names])
        mean = {its_kind: np.mean([worth[place] for place in names]) for its_kind, names in chosen.items()}
        return sorted(places, key=lambda place: mean[kind_of(place)], reverse=True)

    def _worth(self, context: Context, kind: str, places: Sequence[str]) -> dict[str, float]:
        """Return the chance that a look into each place shows the thing, for each step that the look takes."""
        self._worlds.begin([context])
        arrivals = imagine(self._worlds, [f"go to {place}" for place in places])
        plans = [
            [f"go to {place}", *([f"open {place}"] if _CLOSED in arrival.observation else [])]
            for place, arrival in zip(places, arrivals, strict=True)
        ]
        named = re.compile(rf"\b{re.escape(kind)} \d")
        shares = chances(self._worlds, plans, lambda text: bool(named.search(text)), self._samples, self._seed)
        return {place: share / len(plan) for place, share, plan in zip(places, shares, plans, strict=True)}


Arms = Mapping[str, Order]


def make_arms(worlds: LocalWorlds, episodes: Iterable[Episode], samples: int, seed: int) -> Arms:
    orders: tuple[Order, ...] = (listed, partial(shuffled, seed), Table(episodes), Imagined(worlds, samples, seed))
    return dict(zip(ARMS, orders, strict=True))


def measure(world: RealWorld, arms: Arms, spec: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Play missing games, write the results to `out` and return them. Built games are left out."""
    games = [game for game in world.all_games(spec["split"]) if not str(game.variation).startswith("built/")]
    folder = PredictionFolder(out, dict(spec))
    plays = read_plays(folder.path / PLAYS, arms)
    for game in tqdm(games, unit="game", desc=f"{len(arms)} arms"):
        if game.name not in plays:
            plays[game.name] = play_game(world, arms, game, spec["max_steps"])
            folder.add_lines(PLAYS, [plays[game.name]])
    results = make_results(plays, [game.name for game in games], spec)
    write_json(out / "results.json", results)
    write_atomic(out / "report.md", render(results))
    return results


def play_game(world: RealWorld, arms: Arms, game: Game, max_steps: int) -> dict[str, Any]:
    """Play the game once with every arm; return its line of plays.jsonl."""
    line: dict[str, Any] = {"game": game.name, "task": game.task}
    for name, order in arms.items():
        played = world.robustly(game, partial(play_real, Searcher(order), world, game, max_steps))
        refused = sum(map(is_refusal, played.observations))
        line[name] = {"actions": played.actions, "won": won(played), "refused": refused}
    return line


def make_results(plays: Plays, games: Sequence[str], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Build results.json: means a game of each arm, the model's differences from the others, and steps of each game."""

    def column(arm: str, value: Callable[[Mapping[str, Any]], float]) -> Any:
        return np.array([value(plays[game][arm]) for game in games], dtype=np.float64)

    steps = {arm: column(arm, lambda play: len(play["actions"])) for arm in ARMS}
    wins = {arm: column(arm, lambda play: 100 * play["won"]) for arm in ARMS}
    return {
        "n": len(games),
        "game_steps": {arm: counts.astype(int).tolist() for arm, counts in steps.items()},
        "arms": {arm: {"steps": estimate(steps[arm]), "won": estimate(wins[arm])} for arm in ARMS},
        "differences": {
            arm: {"steps": estimate(steps["model"] - steps[arm]), "won": estimate(wins["model"] - wins[arm])}
            for arm in ARMS[:-1]
        },
        "provenance": {**spec, **provenance("lab")},
    }


def render(results: Mapping[str, Any]) -> str:
    """Render report.md."""
    spec = results["provenance"]
    text = f"# Search in ALFWorld\n\n{results['n']} games of split {spec['split']}, at most {spec['max_steps']} steps; "
    text += "means over games, bootstrap 95 % bounds.\n\n"
    rows = [[arm, _cell(row["steps"]), _cell(row["won"])] for arm, row in results["arms"].items()]
    rows += [[f"model - {arm}", _cell(row["steps"]), _cell(row["won"])] for arm, row in results["differences"].items()]
    return text + table(["Order", "real steps a game", "won, %"], rows)


def _cell(estimated: Mapping[str, Any]) -> str:
    low, high = estimated["ci95"]
    return f"{estimated['mean']:.1f} ({low:.1f} to {high:.1f})"
