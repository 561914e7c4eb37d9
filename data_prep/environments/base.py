"""Interface of simulators to the collector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import ClassVar, Protocol

from loopwm.records.episodes import Step
from loopwm.records.names import Names


@dataclass(frozen=True)
class Need:
    """Part text[start:end], determined if one of `facts` is known."""

    start: int
    end: int
    facts: frozenset[str]


@dataclass(frozen=True)
class TextFacts:
    """Facts that a text shows, and its parts that need some, to tell targets that no earlier text determines.

    A fact is any string, such as the name of a place whose contents a text lists. A part of a text needs facts if only
    a reader who knows one of them can predict it; a fact is known once a text that shows it was read.
    """

    shows: frozenset[str] = frozenset()
    needs: tuple[Need, ...] = ()


def needs_of_characters(facts: Iterable[frozenset[str]]) -> tuple[Need, ...]:
    """Return the needs of the longest runs of characters with equal facts; characters without facts have none."""
    needs, start = [], 0
    for known_by, run in groupby(facts):
        end = start + len(list(run))
        if known_by:
            needs.append(Need(start, end, known_by))
        start = end
    return tuple(needs)


class SimulatorError(RuntimeError):
    """Failure of a simulator in an episode. Others may still be played, with a fresh environment."""


class Declared:
    """Properties of an environment that are known without starting it.

    An environment inherits these defaults and overrides them.
    """

    packages: ClassVar[tuple[str, ...]] = ()
    """Packages imported inside functions."""

    names: ClassVar[Names | None] = None
    """Names of things in texts, for entity metrics; None leaves these out."""

    kinds: ClassVar[Path | None] = None
    """File of names of interchangeable things, which `lab/data/renaming.py` exchanges."""

    numbered: ClassVar[bool] = False
    """True if names are kind and number, such as `countertop 2`."""

    @staticmethod
    def state_queries(look: str, inventory: str) -> tuple[tuple[str, str], ...]:
        """Return pairs (action, answer): what commands that only look would answer in this state.

        Training asks them at any step, since `look` and `inventory` are recorded at each. Time that such a command
        would take is neglected. The default knows none.
        """
        return ()

    @staticmethod
    def facts(texts: Sequence[str]) -> list[TextFacts]:
        """Return the facts that each text of an episode shows and needs.

        Training uses them to weigh targets that no earlier text determines. By default every text is determined.

        Args:
            texts: the distinct observations, looks, inventories and actions of an episode.
        """
        return [TextFacts()] * len(texts)

    def exhausted(self) -> bool:
        return False


class Environment(Protocol):
    """One simulator. Call `reset` before anything about the world."""

    name: str
    looks: tuple[str, ...]
    """Commands that only look."""

    idles: tuple[str, ...]
    """Commands that only let time pass."""

    families: Mapping[str, tuple[str, ...]]
    """Tasks that are reported together, by the family's name; every task is in one."""

    solver: str
    """Policy of the environment's own solution: gold, or expert if it searches as a player."""

    def version(self) -> dict[str, str]:
        """Return the simulator's packages with their versions, and our changes to them."""

    def tasks(self) -> list[str]:
        """Return all tasks, in the simulator's order."""

    def splits(self) -> list[str]: ...

    def variations(self, task: str, split: str) -> list[int] | list[str]:
        """Return the variations (or games) of a split, in the simulator's order."""

    def gold_actions(self, task: str, variation: int | str) -> list[str]:
        """Return the simulator's own solution. Leaves no world behind: `reset` before the first step."""

    def reset(self, task: str, variation: int | str) -> Step:
        """Start a variation and return the first observation."""

    def goal(self) -> str: ...

    def loaded(self) -> tuple[str, int | str]:
        """Return task and variation of the loaded world."""

    def hidden_state(self) -> str | None:
        """Return the state that the agent cannot see; None if the environment does not expose it."""

    def step(self, action: str) -> Step: ...

    def valid_actions(self) -> list[str]:
        """Return all valid actions. May cost more than a step."""

    def exhausted(self) -> bool:
        """Return True if a fresh environment should replace this one before the next episode, for lack of memory."""

    def close(self) -> None: ...
