"""Policy `probe`, and its collection: what people try first at places of a solution's path."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from data_prep import collect
from data_prep.environments.base import Environment
from data_prep.policies import CARELESS, POLICIES, Play, Policy, Walk, draw_key
from lab.data import alfworld_probes, scienceworld_probes
from loopwm.records.episodes import Step
from loopwm.records.errors import InputError

EXAMPLE = (
    "python -m lab collect-probes scienceworld --split train --episodes-per-task 100 --max-steps 60 "
    "--out data/episodes/scienceworld-probe"
)

PROBE_GAPS = (0, 0, 0, 1, 2, 3)
"""Steps of the path between two probes."""

PROBE_WEIGHTS = {"absent": 1, "wrong use": 1, "unreachable": 1, "permanence": 2, "repetition": 1}
"""Kinds of probe and their weights: the state after a change is harder to predict than the immediate answer."""

FIRST_PROBE = (0, 0, 0, 1, 2, 4, 8, 16, 32)
"""Steps of the path before the first probe: people try things mostly at the start."""

PROBERS: Mapping[str, Callable[[Any, str, Step, Random], list[str]]] = {
    "scienceworld": lambda environment, kind, step, rng: scienceworld_probes.draw_probe(kind, step, rng),
    "alfworld": lambda environment, kind, step, rng: alfworld_probes.draw_probe(kind, step, environment.places, rng),
}
"""Functions that draw the actions of a probe of a kind. The last step's texts show what is in view and held."""


def act_probe(environment: Environment, gold: Sequence[str], rng: Random) -> Play:
    """Try what people try first, at places of the path."""
    if environment.name not in PROBERS:
        raise InputError(f"environment: must be one of {', '.join(PROBERS)}, got {environment.name!r}")
    path, walk = list(gold), Walk(environment, rng)
    yield from walk.follow(environment.looks[:1])  # a policy is not sent step 0
    until_probe = rng.choice(FIRST_PROBE)
    while True:
        if path and until_probe > 0:
            yield from walk.follow([path.pop(0)])
            until_probe -= 1
            continue
        mark = walk.mark()
        yield from walk.follow(PROBERS[environment.name](environment, draw_key(PROBE_WEIGHTS, rng), walk.step, rng))
        if rng.random() >= CARELESS:
            path = walk.resume(mark, path)
        until_probe = rng.choice(PROBE_GAPS)


def act_one_kind(environment: Environment, kind: str, step: Step, rng: Random) -> Play:
    """Play probes of one kind without end, from the place that a step shows."""
    walk = Walk(environment, rng)
    walk.see(step)
    while True:
        yield from walk.follow(PROBERS[environment.name](environment, kind, walk.step, rng))


def register() -> None:
    """Make the policy known to `data_prep.collect`, in this process."""
    POLICIES["probe"] = Policy("probe", act_probe, needs_gold=True, repeatable=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    register()
    collect.add_arguments(parser)
    parser.set_defaults(policy="probe")


def run(args: argparse.Namespace) -> None:
    if args.dask:
        raise InputError("--dask: not supported here; use --workers and --shard")
    collect.run(args, register)
