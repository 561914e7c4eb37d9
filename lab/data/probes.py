"""Probes: short action lists that people try first, drawn from the state that a place shows.

`lab/data/collect_probes.py:PROBERS` has the environments that can be probed.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import TypeVar

from data_prep import environments

KINDS = ("absent", "wrong use", "unreachable", "permanence", "repetition")


class PlaceProbes(ABC):
    """Draws the probes of one place, a list of actions for each kind."""

    def draw(self, kind: str) -> list[str]:
        """Draw a probe of one of `KINDS`."""
        draws = (self.absent, self.wrong_use, self.unreachable, self.permanence, self.repetition)
        return dict(zip(KINDS, draws, strict=True))[kind]()

    @abstractmethod
    def absent(self) -> list[str]:
        """Name things that are not here."""

    @abstractmethod
    def wrong_use(self) -> list[str]:
        """Use things in view in ways that they do not allow."""

    @abstractmethod
    def unreachable(self) -> list[str]:
        """Name rooms, doors and places out of reach."""

    @abstractmethod
    def permanence(self) -> list[str]:
        """Change something and look at it again."""

    @abstractmethod
    def repetition(self) -> list[str]:
        """Repeat an action."""


OUTSIDE = (
    "dragon", "unicorn", "spaceship", "sword", "piano", "robot", "helicopter", "treasure chest", "wizard", "volcano",
    "submarine", "violin", "castle", "ghost", "trumpet", "camel", "anchor", "rocket", "pyramid", "tractor", "penguin",
    "magic wand", "gold coin", "hammer", "guitar", "bicycle", "umbrella", "ladder", "camera", "elephant", "crown",
    "microscope", "telescope", "backpack", "shoe", "map", "torch", "rope", "shield", "letter", "kitten", "pizza",
)  # fmt: skip
"""Things of neither world."""

PLACES = (
    "garage", "attic", "basement", "moon", "library", "cellar", "school", "forest", "balcony", "north", "upstairs",
)  # fmt: skip
"""Rooms of neither world."""

SYLLABLES = (
    "bla", "dor", "fim", "gru", "ket", "lo", "mip", "nar", "po", "quil", "ra", "sti", "tov", "ulf", "vex", "zan",
)  # fmt: skip
EXTENSIONS = ("cream", "lid", "handle", "box", "cake", "machine", "2", "juice", "bag", "stand")
"""Words that turn a name into another: ice cream for ice."""

_ENVIRONMENTS = Path(environments.__file__).parent

T = TypeVar("T")


@cache
def scienceworld_words() -> tuple[str, ...]:
    return tuple((_ENVIRONMENTS / "scienceworld/entities.txt").read_text(encoding="utf-8").splitlines())


@cache
def alfworld_words() -> tuple[str, ...]:
    """Return kinds of movable things, unnumbered."""
    groups = json.loads((_ENVIRONMENTS / "alfworld/kinds.json").read_bytes())
    return tuple(stem for group in groups for stem in group["stems"])


def invented_word(rng: Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))


def altered_name(names: Sequence[str], rng: Random) -> str:
    """Return a part of a compound in view, or one of its names with another word behind it."""
    compounds = [name for name in names if " " in name]
    if compounds and rng.random() < 0.6:
        words = rng.choice(compounds).split()
        return words[0] if rng.random() < 0.6 else words[-1]
    return f"{rng.choice(names)} {rng.choice(EXTENSIONS)}" if names else invented_word(rng)


def absent_name(own: Sequence[str], foreign: Sequence[str], view: str, names: Sequence[str], rng: Random) -> str:
    """Draw the name of a thing that is not in view.

    Args:
        own: names of this world.
        foreign: names of the other world.
        view: texts of what is in view and held.
        names: names in view.
        rng: the source of all chance.
    """
    draw = rng.random()
    if draw < 0.45:
        candidates = [word for word in own if word.lower() not in view.lower()]
        return rng.choice(candidates)
    if draw < 0.6:
        return rng.choice(foreign)
    if draw < 0.75:
        return rng.choice(OUTSIDE)
    return invented_word(rng) if draw < 0.82 else altered_name(names, rng)


def with_looks(actions: Sequence[str], looks: Callable[[], str], rng: Random, rate: float = 0.3) -> list[str]:
    """Put looks between actions, each with this probability, and most often one at the end."""
    mixed = []
    for action in actions:
        mixed.append(action)
        if rng.random() < rate:
            mixed.append(looks())
    return mixed if rng.random() < 0.4 else [*mixed, looks()]


def pick(options: Sequence[T], rng: Random, default: T) -> T:
    return rng.choice(options) if options else default
