"""Policies as generators: each yields an action and is sent the resulting step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from random import Random
from typing import Any, Protocol, runtime_checkable

from data_prep.environments.base import Environment
from loopwm.records.episodes import Episode, Step
from loopwm.records.errors import InputError

DETOUR_RATES = (0.15, 0.5)
"""Least and greatest share of detours in a noisy episode; each episode draws its own."""

DETOURS = {"near": 4, "valid": 3, "look": 2, "repeat": 1, "idle": 1, "wrong": 2}
"""Kinds of detour and their weights. near: valid and related to the path; wrong: may be refused."""

RUN_DETOURS = {"near": 1, "look": 1, "repeat": 1, "idle": 2}
"""Detours within a run of equal actions, where the world changes by itself."""

LONGEST_RUN = 4
"""Most actions of one detour that repeats or idles."""

NONSENSE = ("open unicorn", "go to moon", "pick up nothing at all", "use the force", "look at unicorn")
FATAL = ("focus",)
"""Verbs that end an episode when misused; only a fatal slip uses them."""

FATAL_SHARE = 0.07
"""Share of noisy episodes with a fatal slip, if one is possible; some turn out harmless."""

CARELESS = 0.3
"""Share of detours after which the path continues unchanged for a while."""

LONGEST_CARELESS = 5
_LEAD = 3
"""Steps ahead on the path whose names count as related."""

_COMMON_WORDS = frozenset(
    ("a", "at", "door", "for", "from", "in", "into", "of", "on", "substance", "the", "to", "with")
)
_CHOICE = re.compile(r"^(\d+):", re.MULTILINE)

Play = Generator[str, Step, None]
"""Generator that yields actions and is sent steps."""


@dataclass(frozen=True)
class Policy:
    """Policy. act: plays, given the environment, the gold path and a random source of its own.

    repeatable: a variation may be played more than once, since chance makes the episodes differ.
    """

    name: str
    act: Callable[[Environment, Sequence[str], Random], Play]
    needs_gold: bool
    repeatable: bool


@runtime_checkable
class Replanner(Protocol):
    """Environment that finds a way back to its path, or a new one, after a detour."""

    def mark(self) -> Any:
        """Return the state that `plan` needs about the place where the path is left."""

    def plan(self, mark: Any, rest: Sequence[str]) -> list[str]:
        """Return a path from here. rest: the path from the marked place."""


def act_gold(environment: Environment, gold: Sequence[str], rng: Random) -> Play:
    # not `yield from`: a list cannot be sent steps
    for action in gold:  # noqa: UP028
        yield action


def act_random(environment: Environment, gold: Sequence[str], rng: Random) -> Play:
    while True:
        yield random_action(environment, rng)


def act_noisy(environment: Environment, gold: Sequence[str], rng: Random) -> Play:
    """Play the gold path with detours; then find the path again, or continue it regardless for a while."""
    rate = rng.uniform(*DETOUR_RATES)
    slip = rng.randrange(len(gold)) if gold and rng.random() < FATAL_SHARE else -1
    path, walk = list(gold), Walk(environment, rng)
    played = 0
    while path:
        if rng.random() < rate:
            mark = walk.mark()
            while True:
                yield from walk.detour(gold, path)
                if rng.random() >= rate:
                    break
            if rng.random() < CARELESS:
                yield from walk.follow(harmless(path)[: rng.randint(1, LONGEST_CARELESS)])
            path = walk.resume(mark, path)
        if played == slip:
            yield from walk.fatal_slip(gold)
        if path:
            yield from walk.follow([path.pop(0)])
        played += 1


def harmless(path: Sequence[str]) -> list[str]:
    """Return the path up to a step that would end the episode out of turn."""
    return list(takewhile(lambda action: action.split()[0] not in FATAL, path))


def choices_in(observation: str) -> list[str]:
    """Return the numbers that an observation offers to choose from."""
    return _CHOICE.findall(observation) if observation.startswith("Ambiguous request") else []


class Walk:
    """State of one play: the path left, and the last step."""

    def __init__(self, environment: Environment, rng: Random) -> None:
        self.environment, self.rng = environment, rng
        self.last = environment.looks[0]
        self.step = Step(None, "", 0, False)
        """Last step; an empty one at first."""

        self.choices: list[str] = []
        """Numbers to choose from now."""

    def mark(self) -> Any:
        return self.environment.mark() if isinstance(self.environment, Replanner) else None

    def resume(self, mark: Any, path: list[str]) -> list[str]:
        return self.environment.plan(mark, path) if isinstance(self.environment, Replanner) else path

    def follow(self, actions: Iterable[str]) -> Play:
        """Play actions. Numbers are skipped unless the environment asks for one, and then one is always given."""
        for action in actions:
            if self.choices and not action.isdecimal():
                yield from self._play(self.rng.choice(self.choices))
            if self.choices or not action.isdecimal():
                yield from self._play(action)

    def _play(self, action: str) -> Play:
        step = yield action
        self.last = action
        self.see(step)

    def see(self, step: Step) -> None:
        self.step = step
        self.choices = choices_in(step.observation)

    def detour(self, gold: Sequence[str], path: Sequence[str]) -> Play:
        in_run = len(path) > 1 and path[0] == path[1]
        weights = RUN_DETOURS if in_run else DETOURS
        yield from self.follow(self.draw(weights)(gold, path))

    def draw(self, weights: Mapping[str, int]) -> Callable[[Sequence[str], Sequence[str]], list[str]]:
        """Draw a kind of detour: a function of the whole solution and the remaining path."""
        idles = self.environment.idles or self.environment.looks
        kinds: dict[str, Callable[[Sequence[str], Sequence[str]], list[str]]] = {
            "near": lambda gold, path: [near_action(self.environment, path, self.rng)],
            "valid": lambda gold, path: [random_action(self.environment, self.rng)],
            "look": lambda gold, path: [self.rng.choice(self.environment.looks)],
            "repeat": lambda gold, path: [self.last] * self.rng.randint(1, LONGEST_RUN),
            "idle": lambda gold, path: [self.rng.choice(idles)] * self.rng.randint(1, LONGEST_RUN),
            "wrong": self._wrong,
        }
        return kinds[draw_key(weights, self.rng)]

    def _wrong(self, gold: Sequence[str], path: Sequence[str]) -> list[str]:
        """Return a step of the path at the wrong time, or nonsense."""
        steps = [action for action in gold if action.split()[0] not in FATAL and not action.isdecimal()]
        return [self.rng.choice(steps if steps and self.rng.random() < 0.8 else NONSENSE)]

    def fatal_slip(self, gold: Sequence[str]) -> Play:
        """Play an action off the path whose verb may end the episode."""
        if slips := fatal_slips(self.environment, gold):
            yield from self.follow([self.rng.choice(slips)])


def fatal_slips(environment: Environment, gold: Sequence[str]) -> list[str]:
    """Return the valid actions off the path whose verb may end the episode."""
    return [a for a in sorted(environment.valid_actions()) if a.split()[0] in FATAL and a not in gold]


def draw_key(weights: Mapping[str, int], rng: Random) -> str:
    return rng.choices(list(weights), weights=list(weights.values()))[0]


def random_action(environment: Environment, rng: Random) -> str:
    """Return a valid action. The verb is drawn first, or actions with two objects would dominate."""
    return of_any_verb(environment, environment.valid_actions(), rng)


def near_action(environment: Environment, path: Sequence[str], rng: Random) -> str:
    """Return a valid action that shares a word of a name with the next steps of the path; else any valid one."""
    words = frozenset[str]().union(*map(named_words, path[:_LEAD]))
    valid = environment.valid_actions()
    near = [action for action in valid if not words.isdisjoint(action.split()[1:])]
    return of_any_verb(environment, near or valid, rng)


def named_words(action: str) -> frozenset[str]:
    return frozenset(action.split()[1:]) - _COMMON_WORDS


def of_any_verb(environment: Environment, actions: Iterable[str], rng: Random) -> str:
    by_verb = defaultdict(list)
    for action in sorted(actions):
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


def replay(environment: Environment, task: str, variation: int | str, history: Iterable[Step]) -> Iterator[Step]:
    """Yield the environment's answers step by step; history[0] is the reset.

    Raises InputError if an observation differs from the recorded one.
    """
    for index, recorded in enumerate(history):
        action = recorded.action
        step = environment.reset(task, variation) if action is None else environment.step(action)
        if step.observation != recorded.observation:
            raise InputError(
                f"{task}, variation {variation}, step {index}: the simulator answers {step.observation[:60]!r}, "
                f"recorded is {recorded.observation[:60]!r}"
            )
        yield step


def replay_hidden_states(environment: Environment, episode: Episode, steps: Set[int]) -> dict[int, str | None]:
    """Return the hidden state after each of these steps. Raises InputError as `replay` does."""
    history = episode.steps[: max(steps) + 1]
    places = replay(environment, episode.task, episode.variation, history)
    return {index: environment.hidden_state() for index, _ in enumerate(places) if index in steps}
