"""Compare the actions that a model accepts with those that a simulator accepts, in states of held-out games.

States lie on solutions. Half of a state's candidates are valid there; the others were valid earlier on the same
solution and are not here, so that words alone do not tell them apart. The simulator's answer to each decides.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from data_prep.environments import ENVIRONMENTS, make_environment
from data_prep.environments.base import Environment
from data_prep.policies import replay
from data_prep.solutions import solve
from eval.commands.calibration import calibrate
from eval.models.checkpoint import checkpoint_hash
from eval.scores.intervals import by_game, resampled_means
from eval.scores.rows import detection
from loopwm import load
from loopwm.records.episodes import Step
from loopwm.records.errors import InputError
from loopwm.records.files import read_json_lines, write_json, write_lines
from loopwm.records.provenance import provenance
from loopwm.records.refusals import is_refused
from loopwm.records.template import Context, Transition
from loopwm.worlds.protocol import Worlds

EXAMPLE = "python -m lab acceptance --model loopwm/pretrained --states lab/data/acceptance_scienceworld.jsonl.xz"

State = Mapping[str, Any]
"""task, variation, goal, steps: [action or null, observation], candidates: [action, whether it is accepted]."""


def collect_states(
    environment: Environment, split: str, games: int, candidates: int, seed: int, per_game: int = 1
) -> Iterator[State]:
    """Yield states of `games` games, whose tasks take turns: `per_game` of each, after 4 to 16 steps or at the end.

    States without enough actions of both kinds are left out.
    """
    rng = Random(f"{seed}/{split}")
    chosen = {task: environment.variations(task, split) for task in environment.tasks()}
    for variations in chosen.values():
        rng.shuffle(variations)
    turns = [(task, variations[i]) for i in range(games) for task, variations in chosen.items() if i < len(variations)]
    for task, variation in turns[:games]:
        gold = solve(environment, task, variation, None)
        steps = [environment.reset(task, variation)]
        valid = [set(environment.valid_actions())]
        depths = sorted(rng.sample(range(4, 17), per_game))
        for action in gold[: depths[-1]]:
            steps.append(environment.step(action))
            valid.append(set(environment.valid_actions()))
        goal = environment.goal()
        for now in sorted({min(depth, len(gold)) for depth in depths}):
            here, seen = valid[now], steps[: now + 1]
            elsewhere = set().union(*valid[:now]) - here
            if seen[-1].done or min(len(here), len(elsewhere)) < candidates // 2:
                continue
            actions = [*_sample(here, candidates // 2, rng), *_sample(elsewhere, candidates // 2, rng)]
            judged = [[action, _accepts(environment, task, variation, seen, action)] for action in actions]
            shown = [[step.action, step.observation] for step in seen]
            yield {"task": task, "variation": variation, "goal": goal, "steps": shown, "candidates": judged}


def _accepts(environment: Environment, task: str, variation: int | str, steps: Sequence[Step], action: str) -> bool:
    """Return whether the simulator carries out an action after these steps."""
    for _ in replay(environment, task, variation, steps):
        pass
    return not is_refused(environment.step(action).observation)


def _sample(actions: Iterable[str], count: int, rng: Random) -> list[str]:
    """Draw distinct actions, the verb first, or those with two objects would dominate."""
    by_verb: dict[str, list[str]] = {}
    for action in sorted(actions):
        by_verb.setdefault(action.split()[0], []).append(action)
    sample: list[str] = []
    while len(sample) < count:
        verb = rng.choice(list(by_verb))
        sample.append(by_verb[verb].pop(rng.randrange(len(by_verb[verb]))))
        by_verb = {name: left for name, left in by_verb.items() if left}
    return sample


def read_states(path: Path, names: Sequence[str] = ("goal", "steps", "candidates")) -> list[State]:
    """Read states. Raises InputError naming file, line and field for one without a field in `names`."""
    states = list[State]()
    for number, state in read_json_lines(path):
        if missing := [name for name in names if name not in state]:
            raise InputError(f"{path}: line {number}: {missing[0]}: missing")
        states.append(state)
    return states


def context_of(state: State) -> Context:
    (_, first), *steps = state["steps"]
    return Context(state["goal"], first, tuple(Transition(action, observation) for action, observation in steps))


class Judged(NamedTuple):
    """A candidate: the probability that it is accepted, whether the model accepts it and whether the simulator does."""

    acceptance: float
    accepted: bool
    truth: bool


def judge(worlds: Worlds, state: State, decode: bool) -> list[Judged]:
    """Judge each candidate. Raises InputError for a model without an acceptance head.

    decode: judge by the imagined observation, too, not by the acceptance head alone.
    """
    worlds.begin([context_of(state)])
    forks = worlds.fork([0] * len(state["candidates"]))
    imagined = forks.step([action for action, _ in state["candidates"]], decode)
    forks.close()
    judged = list[Judged]()
    for step, (_, truth) in zip(imagined, state["candidates"], strict=True):
        if step.acceptance is None:
            raise InputError("--model: must have an acceptance head, which `python -m lab fit-acceptance` adds")
        judged.append(Judged(step.acceptance, step.accepted, truth))
    return judged


def score(worlds: Worlds, states: Sequence[State], decode: bool) -> dict[str, Any]:
    """Return figures of what is accepted and of what is refused, and candidates a second of processor time.

    Of probabilities: AUROC, expected calibration error, and by tenths [candidates, mean probability, share accepted].
    """
    started = time.process_time()
    by_state = [judge(worlds, state, decode) for state in tqdm(states, unit="state")]
    seconds = time.process_time() - started
    judged = [one for of_state in by_state for one in of_state]
    pairs = [(one.accepted, one.truth) for one in judged]
    games = [game_of(state) for state, of_state in zip(states, by_state, strict=True) for _ in of_state]
    calibration = calibrate(np.array([one.acceptance for one in judged]), np.array([one.truth for one in judged]))
    return {
        "candidates": len(pairs),
        "accepted": detection(pairs) | {"f1_ci95": f1_interval95(pairs, games)},
        "refused": detection([(not said, not truth) for said, truth in pairs]),
        "auroc": calibration.auroc,
        "ece": calibration.ece,
        "bins": [[b.n, b.trust, b.right] for b in calibration.bins],
        "per_second": len(pairs) / seconds,
    }


def game_of(state: State) -> str:
    return f"{state['task']} {state['variation']}"


def f1_interval95(pairs: Sequence[tuple[bool, bool]], games: Sequence[str]) -> list[float] | None:
    """Return bounds of F1 of (predicted, true) pairs, resampling games with all their pairs. games: of each pair.

    Resamples without a predicted or true pair, which have no F1, are left out. None if no resample has one.
    """
    sums, _ = by_game(np.array([[2.0 * (said and truth), said + truth] for said, truth in pairs]), games)
    twice_hits, marked = resampled_means(sums).T
    defined = marked > 0
    if not defined.any():
        return None
    return np.percentile(twice_hits[defined] / marked[defined], [2.5, 97.5]).tolist()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="checkpoint folder; without it, states are only collected")
    parser.add_argument("--states", type=Path, required=True, help="file of the states, collected if it is not there")
    parser.add_argument("--environment", default="scienceworld", choices=list(ENVIRONMENTS))
    parser.add_argument("--split", default="test")
    parser.add_argument("--games", type=int, default=100, help="games that states are collected of")
    parser.add_argument("--per-game", type=int, default=1, help="states of a game")
    parser.add_argument("--candidates", type=int, default=20, help="actions of a state, half of them valid")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the results")


def run(arguments: argparse.Namespace) -> None:
    """Collect states, or read them, and judge them. Raises InputError."""
    if not arguments.states.exists():
        with closing(make_environment(arguments.environment)) as environment:
            new = collect_states(
                environment,
                arguments.split,
                arguments.games,
                arguments.candidates,
                arguments.seed,
                arguments.per_game,
            )
            write_lines(arguments.states, [json.dumps(state) for state in tqdm(new, unit="state")])
    if arguments.model is None:
        return
    states = read_states(arguments.states, ("task", "variation", "goal", "steps", "candidates"))
    if not states:
        raise InputError(f"--states: {arguments.states} holds no state")
    worlds = load(arguments.model)
    counts = {"states": len(states), "games": len(set(map(game_of, states)))}
    settings = {"states": arguments.states.name, "model_sha256": checkpoint_hash(arguments.model)}
    result: dict[str, Any] = counts | {"provenance": settings | provenance("lab")}
    result |= {"head": score(worlds, states, False), "head_and_text": score(worlds, states, True)}
    print(json.dumps({name: value for name, value in result.items() if name != "provenance"}, indent=1))
    if arguments.out is not None:
        write_json(arguments.out / "results.json", result)
