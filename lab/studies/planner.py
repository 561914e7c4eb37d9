"""Look-ahead: an agent that imagines candidate plans before it acts, against itself without a model.

The agent retrieves places of train episodes that resemble its own (BM25) and the actions after them. Each different
action starts a candidate plan: the next K actions of the train episode. Six arms choose among the same candidates:

    retrieval     the plan of the most similar place; no model
    random        any of the plans; no model
    ordered       the most similar place whose first action is not imagined to be refused or to lose points
                  (`loopwm.worlds.planning`)
    expected-K    the plan with the most imagined points in K actions, `ordered` where none is expected
    look-ahead-1  imagines the first action of every plan
    look-ahead-K  imagines all K actions of every plan

Look-ahead runs all plans in one batch, K deferred advances without decoding. Then it scores, for each plan, the
observation that the train episode has after it, and the refusals; no text is generated. A plan's score is its place's
similarity (1 for the best) plus `--weight` times its agreement: the probability that the last action is not refused,
times the geometric mean of the probabilities of the observation's tokens. The agent takes the first action of the best
plan, then plans again.

Every arm has the same number of environment steps, and both look-aheads score the same number of plans. Every arm plays
each game; results.json, report.md and plays.jsonl are written to --out. Rerun the command to resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from time import process_time
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

from eval.models.checkpoint import CheckpointPredictor
from eval.scores.predictions import PredictionFolder
from eval.scores.tables import table
from lab.agents.agents import REFUSALS, Recalled, RetrievalAgent, is_refusal
from lab.agents.play import PLAYS, play_real, read_plays, won
from lab.agents.real_world import Game, RealWorld
from lab.estimates import estimate
from lab.studies.teacher_forcing import nll_of_rows
from loopwm.records.episodes import recorded_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import write_atomic, write_json
from loopwm.records.provenance import provenance
from loopwm.records.template import Context, Transition
from loopwm.worlds import planning
from loopwm.worlds.local import LocalWorlds

Plans = Sequence[Recalled]

MOST_DECODED = 32
"""Tokens of an imagined observation: refusals are shorter, and a text that is cut counts as none."""


LEAST_POINTS = 1.0
"""Points that a plan has to be expected to bring before it is preferred: ScienceWorld pays whole ones."""


@dataclass(frozen=True)
class PlanSettings:
    """Games to play. tasks: all if none; horizon: K; candidates: maximum plans per decision."""

    env: str
    tasks: tuple[str, ...]
    split: str
    episodes: int
    max_steps: int
    seed: int
    candidates: int
    horizon: int
    weight: float


@dataclass
class Work:
    """Cost of a play. seconds: this process's CPU time; overruled: decisions against the most similar place."""

    decisions: int = 0
    overruled: int = 0
    advances: int = 0
    imagined_steps: int = 0
    plans: int = 0
    seconds: float = 0.0


class Chooser(Protocol):
    def choose(self, context: Context, plans: Plans, work: Work) -> int:
        """Return the index of a plan, of at least one, and add the model's cost to `work`."""
        ...


class MostSimilar:
    def choose(self, context: Context, plans: Plans, work: Work) -> int:
        return 0


class AnyPlan:
    def __init__(self, seed: str) -> None:
        self._random = Random(seed)

    def choose(self, context: Context, plans: Plans, work: Work) -> int:
        return self._random.randrange(len(plans))


class Imagining:
    """Chooser with a world of one play; real steps extend it."""

    def __init__(self, worlds: LocalWorlds) -> None:
        self._worlds = worlds
        self._history: tuple[Transition, ...] | None = None

    def _see(self, context: Context) -> None:
        """Append the last real step to the world, or encode the context if more than one step is new."""
        last = context.history[-1:]
        if last and self._history == context.history[:-1]:
            self._worlds.observe([last[0].action], [last[0].observation])
        else:
            self._worlds.begin([context])
        self._history = context.history


class Ordered(Imagining):
    """Chooser that imagines each plan's first action and decodes what follows."""

    def choose(self, context: Context, plans: Plans, work: Work) -> int:
        self._see(context)
        work.advances += 1
        work.imagined_steps += len(plans)
        work.plans += len(plans)
        return planning.order_actions(self._worlds, [plan.after[0].action for plan in plans])[0]


class Expected(Imagining):
    """Chooser of the plan whose first `horizon` actions are imagined to bring the most points."""

    def __init__(self, worlds: LocalWorlds, horizon: int) -> None:
        super().__init__(worlds)
        self._horizon = horizon

    def choose(self, context: Context, plans: Plans, work: Work) -> int:
        self._see(context)
        ahead = [[step.action for step in plan.after[: self._horizon]] for plan in plans]
        work.advances += max(map(len, ahead))
        work.imagined_steps += sum(map(len, ahead))
        work.plans += len(ahead)
        best = planning.best_plan(self._worlds, ahead, LEAST_POINTS)
        return planning.order_actions(self._worlds, [actions[0] for actions in ahead])[0] if best is None else best


class LookAhead(Imagining):
    """Chooser that imagines the first `horizon` actions of each plan."""

    def __init__(self, worlds: LocalWorlds, horizon: int, weight: float) -> None:
        super().__init__(worlds)
        self._horizon, self._weight = horizon, weight

    def choose(self, context: Context, plans: Plans, work: Work) -> int:
        agreements = self.agreements(context, plans, work)
        return best_plan([plan.similarity for plan in plans], agreements, self._weight)

    def agreements(self, context: Context, plans: Plans, work: Work) -> list[float]:
        """Return the agreements of the plans, each in [0, 1]."""
        self._see(context)
        ahead = [plan.after[: self._horizon] for plan in plans]
        scores, rows = [0.0] * len(ahead), list(range(len(ahead)))
        worlds = self._worlds.fork([0] * len(ahead))
        for k in range(1, max(map(len, ahead)) + 1):
            going = [i for i, row in enumerate(rows) if len(ahead[row]) >= k]
            rows = [rows[i] for i in going]
            worlds = worlds.fork(going)
            worlds.step([ahead[row][k - 1].action for row in rows], decode=False)
            work.advances += 1
            work.imagined_steps += len(rows)
            over = [i for i, row in enumerate(rows) if len(ahead[row]) == k]
            if over:
                observations = [ahead[rows[i]][-1].observation for i in over]
                for i, value in zip(over, _agreements(worlds.fork(over), observations), strict=True):
                    scores[rows[i]] = value
        work.plans += len(ahead)
        return scores


def _agreements(worlds: LocalWorlds, observations: Sequence[str]) -> list[float]:
    losses, tokens = nll_of_rows(worlds, observations)
    refused = sum(torch.exp(-nll_of_rows(worlds, [text] * len(observations))[0]) for text in sorted(REFUSALS))
    agreements: list[float] = ((1 - refused) * torch.exp(-losses / tokens)).tolist()
    return agreements


def best_plan(similarities: Sequence[float], agreements: Sequence[float], weight: float) -> int:
    """Return the first of the best plans, by similarity (relative to the highest) plus weight times agreement."""
    highest = max(similarities) or 1.0
    scores = [s / highest + weight * a for s, a in zip(similarities, agreements, strict=True)]
    return scores.index(max(scores))


def candidate_plans(agent: RetrievalAgent, context: Context, count: int) -> list[Recalled]:
    """Return the most similar place of each of up to `count` different next actions, best first.

    Returns [] if the most similar place is the end of an episode: the agent stops there.
    """
    plans: dict[str | None, Recalled] = {}
    for place in agent.recall(context):
        if place.action is None and not plans:
            return []
        if place.action is not None:
            plans.setdefault(place.action, place)
        if len(plans) == count:
            break
    return list(plans.values())


class PlanningAgent:
    """Retrieval agent whose plan a chooser selects. For one play, whose cost `work` accumulates."""

    identity: Mapping[str, str | int] = {}

    def __init__(self, agent: RetrievalAgent, chooser: Chooser, candidates: int) -> None:
        self._agent, self._chooser, self._candidates = agent, chooser, candidates
        self.work = Work()

    def act(self, context: Context) -> str | None:
        began = process_time()
        plans = candidate_plans(self._agent, context, self._candidates)
        chosen = self._chooser.choose(context, plans, self.work) if plans else 0
        self.work.decisions += 1
        self.work.overruled += chosen > 0
        self.work.seconds += process_time() - began
        return plans[chosen].action if plans else None


Arms = Mapping[str, Callable[[Game], Chooser]]
"""Name -> factory of an arm's chooser for a game. The first arm is the reference, the last the one under test."""


def make_arms(make_worlds: Callable[[], LocalWorlds], settings: PlanSettings) -> Arms:
    def look_ahead(horizon: int) -> LookAhead:
        return LookAhead(make_worlds(), horizon, settings.weight)

    return {
        "retrieval": lambda game: MostSimilar(),
        "random": lambda game: AnyPlan(f"{settings.seed}/{game.name}"),
        "ordered": lambda game: Ordered(make_worlds()),
        f"expected-{settings.horizon}": lambda game: Expected(make_worlds(), settings.horizon),
        "look-ahead-1": lambda game: look_ahead(1),
        f"look-ahead-{settings.horizon}": lambda game: look_ahead(settings.horizon),
    }


def measure(
    agent: RetrievalAgent, arms: Arms, world: RealWorld, settings: PlanSettings, spec: Mapping[str, Any], out: Path
) -> dict[str, Any]:
    """Play missing games, write the results to `out` and return them. spec: other settings that determine them."""
    games = world.choose_games(settings.tasks, settings.split, settings.episodes, settings.seed)
    spec = {**asdict(settings), "tasks": list(settings.tasks), **agent.identity, **spec}
    folder = PredictionFolder(out, spec)
    plays = read_plays(folder.path / PLAYS, arms)
    for game in tqdm(games, unit="game", desc=f"{len(arms)} arms"):
        if game.name not in plays:
            plays[game.name] = play_game(agent, arms, world, game, settings)
            folder.add_lines(PLAYS, [plays[game.name]])
    results = make_results([plays[game.name] for game in games], list(arms), spec)
    results["provenance"]["commits"] = folder.commits()
    write_json(out / "results.json", results)
    write_atomic(out / "report.md", render(results))
    return results


def play_game(
    agent: RetrievalAgent, arms: Arms, world: RealWorld, game: Game, settings: PlanSettings
) -> dict[str, Any]:
    """Play the game once with every arm; return its line of plays.jsonl."""

    def play(make_chooser: Callable[[Game], Chooser]) -> dict[str, Any]:
        player = PlanningAgent(agent, make_chooser(game), settings.candidates)
        played = play_real(player, world, game, settings.max_steps)
        refused = sum(map(is_refusal, played.observations))
        return {**asdict(played), "success": won(played), "refused": refused, "work": asdict(player.work)}

    played = {name: world.robustly(game, partial(play, chooser)) for name, chooser in arms.items()}
    return {"game": game.name, "task": game.task, **played}


def make_results(plays: Sequence[Mapping[str, Any]], arms: Sequence[str], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Build results.json. Scores below 0 count as 0."""
    score = {arm: np.array([max(play[arm]["score"], 0) for play in plays], dtype=float) for arm in arms}
    success = {arm: np.array([100 * play[arm]["success"] for play in plays], dtype=float) for arm in arms}
    refused = {arm: np.array([play[arm]["refused"] for play in plays], dtype=float) for arm in arms}
    steps = {arm: np.array([len(play[arm]["actions"]) for play in plays], dtype=float) for arm in arms}
    lost = {arm: np.array([100 * (play[arm]["score"] < 0) for play in plays], dtype=float) for arm in arms}
    measures = {"score": score, "success": success, "lost": lost, "refused": refused, "steps": steps}
    tasks = sorted({play["task"] for play in plays})
    of_task = {task: [i for i, play in enumerate(plays) if play["task"] == task] for task in tasks}
    return {
        "n": len(plays),
        "arms": {
            arm: {**{name: estimate(measures[name][arm]) for name in ("score", "success", "lost")}, **_work(plays, arm)}
            for arm in arms
        },
        "differences": [
            {"a": arms[-1], "b": other}
            | {name: estimate(values[arms[-1]] - values[other]) for name, values in measures.items()}
            for other in arms[:-1]
        ],
        "task_scores": {
            task: {"n": len(rows), **{arm: float(score[arm][rows].mean()) for arm in arms}}
            for task, rows in of_task.items()
        },
        "provenance": {**spec, **provenance("lab")},
    }


def _work(plays: Sequence[Mapping[str, Any]], arm: str) -> dict[str, float]:
    """Return environment steps and refusals per game, and the other costs per decision."""
    decisions = sum(play[arm]["work"]["decisions"] for play in plays)
    shares = {name: sum(play[arm]["work"][name] for play in plays) / decisions for name in _WORK}
    steps = float(np.mean([len(play[arm]["actions"]) for play in plays]))
    return {"steps": steps, "refused": float(np.mean([play[arm]["refused"] for play in plays])), **shares}


_WORK = ("overruled", "advances", "imagined_steps", "plans", "seconds")


def render(results: Mapping[str, Any]) -> str:
    """Render report.md."""
    spec, arms = results["provenance"], results["arms"]
    text = f"# Look-ahead in {spec['env']}\n\n{results['n']} games of split {spec['split']}, at most "
    text += f"{spec['max_steps']} steps, up to {spec['candidates']} candidate plans, weight {spec['weight']:g}. Final "
    text += "scores of 0 to 100 (negative ones count as 0), success and games lost (negative scores) in per cent, "
    text += "bootstrap 95 % bounds over games.\n\n"
    header = ["Arm", "score", "success", "lost", "steps a game", "refused", "overruled", "advances a decision"]
    header += ["imagined steps", "plans imagined", "core-seconds"]
    text += table(header, [_arm_line(arm, row) for arm, row in arms.items()])
    text += "\nRefused: steps a game that the world refused. Overruled: share of decisions against the most similar "
    text += "place. The last four are of one decision.\n\nDifferences over the same games:\n\n"
    measures = ["score", "success", "lost", "refused", "steps"]
    lines = [[f"{d['a']} - {d['b']}", *(_cell(d[name]) for name in measures)] for d in results["differences"]]
    text += table(["", *measures], lines)
    text += "\nMean score by task:\n\n"
    by_task = results["task_scores"].items()
    return text + table(
        ["Task", "n", *arms], [[task, str(row["n"]), *(f"{row[arm]:.1f}" for arm in arms)] for task, row in by_task]
    )


def _arm_line(arm: str, row: Mapping[str, Any]) -> list[str]:
    counts = [f"{row[name]:.1f}" for name in ("steps", "refused")]
    shares = [f"{row[name]:.2f}" for name in _WORK]
    return [arm, *(_cell(row[name]) for name in ("score", "success", "lost")), *counts, *shares]


def _cell(estimate: Mapping[str, Any]) -> str:
    low, high = estimate["ci95"]
    return f"{estimate['mean']:.1f} ({low:.1f} to {high:.1f})"


def run_planner(
    model: Path, train_episodes: Sequence[Path], settings: PlanSettings, names: Sequence[str], out: Path
) -> None:
    """Play missing games with the arms of these names, all if none; write results.json, report.md and plays.jsonl.

    Raises InputError for an unknown arm.
    """
    torch.set_num_threads(1)  # seconds are those of one core
    predictor = CheckpointPredictor(model)
    episodes = [episode for episode in recorded_episodes(train_episodes) if episode.env == settings.env]
    arms = make_arms(lambda: LocalWorlds(predictor.world_model, predictor.depth, MOST_DECODED), settings)
    if unknown := [name for name in names if name not in arms]:
        raise InputError(f"--arms: expected some of {', '.join(arms)}, got {unknown[0]}")
    arms = {name: arms[name] for name in names or arms}
    with RealWorld(settings.env) as world:
        measure(RetrievalAgent(episodes), arms, world, settings, predictor.identity, out)
