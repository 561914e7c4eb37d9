"""Who plays: a policy yields the next action as long as it is asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol, runtime_checkable

from data_prep.environments.base import Environment

DETOUR_RATES = (0.15, 0.5)
"""Least and greatest share of detours in a noisy episode; each episode draws its own."""

INVALID = ("open unicorn", "go to moon", "pick up nothing at all", "use the force", "look at unicorn")
FATAL = ("focus",)
"""Verbs that end an episode when they go wrong; random actions avoid them."""


@dataclass(frozen=True)
class Policy:
    """`act` yields actions, given the environment, the gold path and a random source of its own.

    `repeatable`: a variation may be played more than once, since chance makes the episodes differ.
    """

    name: str
    act: Callable[[Environment, Sequence[str], Random], Iterator[str]]
    needs_gold: bool
    repeatable: bool


@runtime_checkable
class Replanner(Protocol):
    """An environment whose solution can be found anew after a detour."""

    def plan(self) -> list[str]: ...


def act_gold(environment: Environment, gold: Sequence[str], rng: Random) -> Iterator[str]:
    yield from gold


def act_noisy(environment: Environment, gold: Sequence[str], rng: Random) -> Iterator[str]:
    """The gold path with detours; where a detour broke it, the path is found anew or else goes on regardless."""
    rate = rng.uniform(*DETOUR_RATES)
    last = environment.looks[0]
    path = list(gold)
    while path:
        strayed = False
        while rng.random() < rate:
            last, strayed = _detour(environment, last, rng), True
            yield last
        if strayed and isinstance(environment, Replanner):
            path = environment.plan()
        last = path.pop(0)
        yield last


def act_random(environment: Environment, gold: Sequence[str], rng: Random) -> Iterator[str]:
    while True:
        yield random_action(environment, rng)


def _detour(environment: Environment, last: str, rng: Random) -> str:
    kind = rng.choices(("valid", "look", "repeat", "invalid"), weights=(6, 2, 1, 1))[0]
    if kind == "valid":
        return random_action(environment, rng)
    return {"look": rng.choice(environment.looks), "repeat": last, "invalid": rng.choice(INVALID)}[kind]


def random_action(environment: Environment, rng: Random) -> str:
    """A valid action: the verb is drawn first, or actions with two objects would crowd out the rest."""
    by_verb = defaultdict(list)
    for action in sorted(environment.valid_actions()):
        by_verb[action.split()[0]].append(action)
    verbs = [verb for verb in by_verb if verb not in FATAL]
    return rng.choice(by_verb[rng.choice(verbs)]) if verbs else environment.looks[0]


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("gold", act_gold, needs_gold=True, repeatable=False),
        Policy("expert", act_gold, needs_gold=True, repeatable=False),
        Policy("noisy-expert", act_noisy, needs_gold=True, repeatable=True),
        Policy("random", act_random, needs_gold=False, repeatable=True),
    )
}
