"""Real world of an agent: a simulator of `data_prep`, started on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from random import Random
from types import TracebackType
from typing import TypeVar

from data_prep.environments import make_environment
from data_prep.environments.base import Environment, SimulatorError
from loopwm.records.episodes import Step
from loopwm.records.errors import InputError
from loopwm.records.template import Context, ContextKind, FormatError, window_context

T = TypeVar("T")


@dataclass(frozen=True)
class Game:
    """One variation of a task."""

    task: str
    variation: int | str

    @property
    def name(self) -> str:
        return f"{self.task}/{self.variation}"


class RealWorld:
    """One simulator, replaced when it is out of memory or broken. Used as a context manager.

    Raises InputError for a simulator that cannot start.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._environment = self._make()

    def __enter__(self) -> RealWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._environment.close()

    def choose_games(self, tasks: Sequence[str], split: str, count: int, seed: int) -> list[Game]:
        """Draw `count` games, tasks in turn, each task's without repeats. Raises InputError naming the option."""
        known, splits = self._environment.tasks(), self._environment.splits()
        if unknown := sorted(set(tasks) - set(known)):
            raise InputError(f"--tasks: must be some of {', '.join(known)}, got {unknown[0]!r}")
        if split not in splits:
            raise InputError(f"--split: must be one of {', '.join(splits)}, got {split!r}")
        try:
            by_task = [self._shuffled(task, split, seed) for task in dict.fromkeys(tasks or known)]
        except (InputError, SimulatorError) as error:
            raise InputError(f"--env: {error}") from error
        in_turn = [game for turn in zip_longest(*by_task) for game in turn if game is not None]
        if len(in_turn) < count:
            raise InputError(
                f"--episodes: must be at most {len(in_turn)}, the variations in split {split!r}, got {count}"
            )
        return in_turn[:count]

    def all_games(self, split: str) -> list[Game]:
        """Return every game of a split, task after task. Raises InputError if there are none."""
        return [
            Game(task, name) for task in self._environment.tasks() for name in self._environment.variations(task, split)
        ]

    def _shuffled(self, task: str, split: str, seed: int) -> list[Game]:
        games = [Game(task, variation) for variation in self._environment.variations(task, split)]
        Random(f"{seed}/{task}/{split}").shuffle(games)
        return games

    def start(self, game: Game, context_kind: ContextKind) -> Context:
        """Start a game and return its context. Raises InputError naming a field the environment lacks."""
        first, goal = self._environment.reset(game.task, game.variation), self._environment.goal()
        hidden = self._environment.hidden_state() if context_kind in ("full", "briefed") else None
        start = {
            "goal": goal, "history": [{"action": None, "observation": first.observation}], "look": first.look,
            "inventory": first.inventory, "hidden_state": hidden, "hidden_state_start": hidden,
        }  # fmt: skip
        try:
            return window_context(start, context_kind)
        except FormatError as error:
            raise InputError(f"--context: {self.name}: {error}") from error

    def step(self, action: str) -> Step:
        return self._environment.step(action)

    def robustly(self, game: Game, play: Callable[[], T]) -> T:
        """Return `play()`, retried once in a fresh simulator if it breaks down or runs out of memory.

        Raises InputError if it breaks down again.
        """
        try:
            if self._environment.exhausted():
                self._replace()
            return play()
        except SimulatorError:
            self._replace()
        try:
            return play()
        except SimulatorError as error:
            raise InputError(f"{self.name}: {game.name}: {error}") from error

    def _replace(self) -> None:
        self._environment.close()
        self._environment = self._make()

    def _make(self) -> Environment:
        try:
            return make_environment(self.name)
        except InputError as error:
            raise InputError(f"--env: {error}") from error
