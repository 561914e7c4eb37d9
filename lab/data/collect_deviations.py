"""Policies that leave a solution's path in one particular way, and their collection: the packed training data has them.

`data_prep/collect_all.sh` plays them. `loopwm.records` reads their episodes as all others.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import dropwhile
from random import Random

from data_prep import collect
from data_prep.environments.base import Environment
from data_prep.policies import (
    FATAL,
    LONGEST_CARELESS,
    POLICIES,
    Play,
    Policy,
    Walk,
    fatal_slips,
    harmless,
    named_words,
    of_any_verb,
)
from data_prep.solutions import packed_solutions
from lab.data.probes import absent_name, alfworld_words, scienceworld_words
from lab.data.scienceworld_probes import EVERYWHERE, Scene
from loopwm.records.errors import InputError

EXAMPLE = (
    "python -m lab collect-deviations scienceworld --policy fork --split train --episodes-per-task 480 "
    "--max-steps 220 --out data/episodes/scienceworld-fork"
)

FORK_GAPS = (2, 6)
"""Least and most steps of the path between a fork's end and the next one."""

REACHES = (1, 2, 4, 12, 30)
"""Numbers of later steps of the path among which those to try are drawn."""

TRIES = (1, 1, 2, 3)
"""Numbers of steps tried at one place."""

WAYS = ("go to", "open door to")
ONLY_THINGS = 0.7
"""Share of the places where no door or room is tried."""

AHEAD_GAPS = (1, 3)
"""Least and most steps of the path between two places where later ones are tried."""

ELSEWHERE = 0.65
"""Share of the places where steps at other places are tried, not the next ones."""

LOOK_FIRST = 0.5
"""Share of the places with a look or an inventory before the tries."""

STRETCHES = 0.5
"""Share of the places where the tries are a stretch of the path whose first steps are left out."""

LEFT_OUT = (1, 1, 1, 2, 3)
"""Numbers of steps left out before a stretch."""

CHANGING = (
    "activate", "clean", "close", "cool", "deactivate", "heat", "mix", "move", "open", "pick", "pour", "put", "take",
)  # fmt: skip
"""Verbs that change what a look or an inventory shows."""

CHANGES = (1, 1, 2, 3)
"""Numbers of changes made in a row at one place."""

BOTH_LOOKS = 0.3
"""Share of the places where the changes stand between looks of every kind, not of one."""

EARLY = 0.3
"""Share of fatal episodes that leave the path before the step that may be misused, not at it."""

RELATED = 0.5
"""Share of fatal episodes whose last action shares a word of a name with the path, if such a one is possible."""

ABSENT_TRIES = (1, 1, 2, 3)
"""Numbers of things out of view that an episode focuses on."""

ASKED_FOR = 0.4
"""Share of them that a solution of the task, of this game or another, focuses on."""

OF_THIS_WORLD = 0.7
"""Share of the others that are things of ScienceWorld; the rest are named as probes name what is absent."""

WANDERS = 0.4
"""Share of episodes that leave the path before their last focus, through up to `WANDERINGS` doors."""

WANDERINGS = 3

IN_VIEW = 0.8
"""Share of episodes that focus on something in view at last, which mostly loses the game."""

ALIKE = 0.7
"""Share of these where it is a thing that solutions of the task focus on, if one is in view: mostly of other games."""


def act_leaving_out(leaving: Leaving, environment: Environment, gold: Sequence[str], rng: Random) -> Play:
    """Play the gold path; at times replace a step by another action, continue the path, and find it again."""
    path, walk = list(gold), Walk(environment, rng)
    until_fork = rng.randint(*FORK_GAPS) - 1
    while path:
        if until_fork > 0 or not leaving.where(path):
            yield from walk.follow([path.pop(0)])
            until_fork -= 1
            continue
        mark = walk.mark()
        yield from walk.follow([other_action(walk, path, leaving.kinds)])
        yield from walk.follow(harmless(path[1:])[: rng.choice(leaving.lengths)])
        path = walk.resume(mark, path)
        until_fork = rng.randint(*FORK_GAPS)


def act_ahead(environment: Environment, gold: Sequence[str], rng: Random) -> Play:
    """Play the gold path; between its steps try others of its steps, many of which are refused there."""
    path, walk = list(gold), Walk(environment, rng)
    while path:
        mark = walk.mark()
        if rng.random() < LOOK_FIRST:
            yield from walk.follow([rng.choice(environment.looks)])
        yield from walk.follow(_stretch(path, rng) if rng.random() < STRETCHES else _scattered(gold, path, rng))
        path = walk.resume(mark, path)
        steps = rng.randint(*AHEAD_GAPS)
        yield from walk.follow(path[:steps])
        del path[:steps]


def act_changing(environment: Environment, gold: Sequence[str], rng: Random) -> Play:
    """Play the gold path; between its steps change things at random, and look before and after."""
    path, walk = list(gold), Walk(environment, rng)
    while path:
        mark = walk.mark()
        looks = environment.looks if rng.random() < BOTH_LOOKS else [rng.choice(environment.looks)]
        yield from walk.follow(looks)
        for _ in range(rng.choice(CHANGES)):
            changes = [action for action in environment.valid_actions() if action.startswith(CHANGING)]
            yield from walk.follow([of_any_verb(environment, changes, rng), *looks])
        path = walk.resume(mark, path)
        steps = rng.randint(*AHEAD_GAPS)
        yield from walk.follow(path[:steps])
        del path[:steps]


def act_fatal(environment: Environment, gold: Sequence[str], rng: Random) -> Play:
    """Play the gold path up to an action that may be misused, and misuse it, which mostly ends the episode."""
    turns = [place for place, action in enumerate(gold) if action.split()[0] in FATAL]
    end = rng.choice(turns or [len(gold)])
    walk = Walk(environment, rng)
    yield from walk.follow(gold[: rng.randint(0, end) if rng.random() < EARLY else end])
    if rng.random() < LOOK_FIRST:
        yield from walk.follow([rng.choice(environment.looks)])
    is_related = rng.random() < RELATED
    slips = fatal_slips(environment, gold)
    if is_related:
        names = frozenset[str]().union(*map(named_words, gold))
        slips = [slip for slip in slips if not names.isdisjoint(named_words(slip))] or slips
    if slips:
        yield from walk.follow([rng.choice(slips)])


def act_focus(environment: Environment, gold: Sequence[str], rng: Random) -> Play:
    """Play the gold path up to any place; focus on things out of view on the way, and on one in view at the end."""
    path = [action for action in gold[: rng.randint(0, len(gold))] if action.split()[0] not in FATAL]
    task, _ = environment.loaded()
    alike = focuses_of(environment.name, task) | {action for action in gold if action.split()[0] in FATAL}
    tries = Counter(rng.choices(range(len(path) + 1), k=rng.choice(ABSENT_TRIES)))
    walk = Walk(environment, rng)
    yield from walk.follow(environment.looks[:1])  # a policy is not sent step 0
    for place in range(len(path) + 1):
        for _ in range(tries[place]):
            yield from walk.follow([_focus_out_of_view(Scene.of(walk.step), alike, rng)])
        yield from walk.follow(path[place : place + 1])
    if rng.random() < WANDERS:
        yield from _wander(walk)
    if rng.random() < IN_VIEW:
        yield from walk.follow([_focus_in_view(Scene.of(walk.step), alike, rng)])


@cache
def focuses_of(env: str, task: str) -> frozenset[str]:
    """Return what packed solutions of a task focus on."""
    solutions = (actions for (name, _), actions in packed_solutions(env).items() if name == task)
    return frozenset(action for actions in solutions for action in actions if action.split()[0] in FATAL)


def _focus_in_view(scene: Scene, alike: Collection[str], rng: Random) -> str:
    shown = sorted(action for action in alike if named_words(action) <= _words(scene.view))
    if shown and rng.random() < ALIKE:
        return rng.choice(shown)
    names = [name for name in scene.names() if name not in EVERYWHERE]
    return f"focus on {rng.choice(names or EVERYWHERE)}"


def _focus_out_of_view(scene: Scene, alike: Collection[str], rng: Random) -> str:
    elsewhere = sorted(action for action in alike if named_words(action).isdisjoint(_words(scene.view)))
    if elsewhere and rng.random() < ASKED_FOR:
        return rng.choice(elsewhere)
    if rng.random() < OF_THIS_WORLD:
        absent = [name for name in scienceworld_words() if name.lower() not in scene.view.lower()]
        return f"focus on {rng.choice(absent)}"
    return f"focus on {absent_name(scienceworld_words(), alfworld_words(), scene.view, scene.names(), rng)}"


def _words(text: str) -> set[str]:
    return set(re.findall(r"[\w-]+", text))


def _wander(walk: Walk) -> Play:
    for _ in range(walk.rng.randint(1, WANDERINGS)):
        doors = sorted(Scene.of(walk.step).doors)
        if doors:
            room = walk.rng.choice(doors)
            yield from walk.follow([f"open door to {room}", f"go to {room}"])


def _stretch(path: Sequence[str], rng: Random) -> list[str]:
    """Return steps in the path's order without the first ones, which they may need."""
    start = rng.choice(LEFT_OUT)
    return _in_turn(path, path[start : start + rng.randint(1, LONGEST_CARELESS)])


def _scattered(gold: Sequence[str], path: Sequence[str], rng: Random) -> list[str]:
    """Return single steps that lie ahead, in any order."""
    later = _in_turn(path, _elsewhere(gold, path) if rng.random() < ELSEWHERE else path[1:])
    if rng.random() < ONLY_THINGS:
        later = [action for action in later if not action.startswith(WAYS)]
    reached = later[: rng.choice(REACHES)]
    return rng.sample(reached, min(len(reached), rng.choice(TRIES)))


def _in_turn(path: Sequence[str], steps: Sequence[str]) -> list[str]:
    """Return the steps without those that would end the episode, as all such do but the path's next one."""
    fatal = next((action for action in path if action.split()[0] in FATAL), None)
    return [action for action in steps if action == fatal or action.split()[0] not in FATAL]


def _elsewhere(gold: Sequence[str], path: Sequence[str]) -> list[str]:
    """Return the steps of the path at other places than the next one's: those ahead, or behind if none is."""
    ahead, behind = (
        list(dropwhile(lambda action: not action.startswith("go to"), steps))[1:]
        for steps in (path, gold[: max(0, len(gold) - len(path))][::-1])  # a way back makes the path longer
    )
    return ahead or behind


def _is_needed(path: Sequence[str]) -> bool:
    """Return True if one of the next two steps does something else with the things of the first."""
    (verb, names), *rest = ((action.split()[0], {*filter(str.isalpha, named_words(action))}) for action in path[:3])
    return any(other != verb and names & theirs for other, theirs in rest)


@dataclass(frozen=True)
class Leaving:
    """Way to leave out a step of the path.

    Fields: its replacements with weights, the number of steps of the path that are then tried regardless, and the paths
    where it applies.
    """

    kinds: Mapping[str, int]
    lengths: Sequence[int]
    where: Callable[[Sequence[str]], bool]


FORK = Leaving({"near": 6, "valid": 2, "look": 1}, range(1, LONGEST_CARELESS + 1), where=bool)
OMISSION = Leaving({"look": 3, "valid": 2}, range(3, LONGEST_CARELESS + 1), where=_is_needed)
"""Where the next steps need the one left out: they are refused because it is missing."""


def other_action(walk: Walk, path: Sequence[str], kinds: Mapping[str, int]) -> str:
    """Draw another next step than the path's, of one of these kinds; a look if eight draws find none."""
    for _ in range(8):
        (other,) = walk.draw(kinds)(path, path)
        if other != path[0]:
            return other
    return walk.environment.looks[0]


DEVIATIONS: Mapping[str, Callable[[Environment, Sequence[str], Random], Play]] = {
    "fork": partial(act_leaving_out, FORK),
    "omission": partial(act_leaving_out, OMISSION),
    "ahead": act_ahead,
    "changing": act_changing,
    "fatal": act_fatal,
    "focus": act_focus,
}


def register() -> None:
    """Make the policies known to `data_prep.collect`, in this process."""
    for name, act in DEVIATIONS.items():
        POLICIES[name] = Policy(name, act, needs_gold=True, repeatable=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    register()
    collect.add_arguments(parser)
    parser.set_defaults(policy="fork")


def run(args: argparse.Namespace) -> None:
    if args.dask:
        raise InputError("--dask: not supported here; use --workers and --shard")
    collect.run(args, register)
