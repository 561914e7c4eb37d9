"""Environment of plain TextWorld: quests in houses that the package generates from a number, as its `tw-make` does.

A variation is the number; splits are ranges of numbers. A game is compiled when it is first played. `pyproject.toml`
registers the class, so that `python -m data_prep collect textworld` finds it once this package is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from data_prep.environments.base import Declared, SimulatorError
from loopwm.records.episodes import Step
from loopwm.records.errors import InputError

QUESTS = {"quest-small": (2, 5, 3), "quest-medium": (4, 10, 5), "quest-large": (8, 20, 8)}
"""Rooms, objects and length of the quest by task."""

SPLITS = {"train": range(10_000), "dev": range(10_000, 11_000), "test": range(11_000, 12_000)}

INFOS = ("description", "inventory", "admissible_commands", "policy_commands", "objective", "facts", "score",
         "max_score", "won", "lost")  # fmt: skip


class TextWorld(Declared):
    """One game at a time."""

    name = "textworld"
    looks: tuple[str, ...] = ("look", "inventory")
    idles: tuple[str, ...] = ("wait",)
    families: Mapping[str, tuple[str, ...]] = {"quest": ("quest-small", "quest-medium", "quest-large")}
    solver = "gold"
    packages = ("textworld",)

    def __init__(self) -> None:
        if find_spec("textworld") is None:
            raise InputError("textworld: the package is not installed; pip install textworld==1.7.0")
        self._folder = TemporaryDirectory()  # removed with the last reference
        self._env: Any = None
        self._state: Any = None
        self._loaded = ("", -1)

    def version(self) -> dict[str, str]:
        return {"textworld": metadata.version("textworld")}

    def tasks(self) -> list[str]:
        return list(QUESTS)

    def splits(self) -> list[str]:
        return list(SPLITS)

    def variations(self, task: str, split: str) -> list[int]:
        return list(SPLITS[split])

    def gold_actions(self, task: str, variation: int | str) -> list[str]:
        self._start(task, variation)
        return list(self._state.policy_commands)

    def reset(self, task: str, variation: int | str) -> Step:
        self._start(task, variation)
        return self._step(None, self._state.description)

    def goal(self) -> str:
        return str(self._state.objective)

    def loaded(self) -> tuple[str, int]:
        return self._loaded

    def hidden_state(self) -> str | None:
        return "\n".join(sorted(f"{fact.name}: {', '.join(fact.names)}" for fact in self._state.facts))

    def step(self, action: str) -> Step:
        self._state, _, _ = self._env.step(action)
        # the interpreter's status line follows the prompt
        return self._step(action, self._state.feedback.partition("\n>")[0].strip())

    def valid_actions(self) -> list[str]:
        return list(self._state.admissible_commands)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _start(self, task: str, variation: int | str) -> None:
        import textworld
        from textworld.generator import CouldNotCompileGameError, QuestGenerationError

        options = textworld.GameOptions()
        options.nb_rooms, options.nb_objects, options.quest_length = QUESTS[task]
        options.seeds, options.path = int(variation), f"{self._folder.name}/{task}-{variation}.z8"
        try:
            if not Path(options.path).is_file():
                textworld.make(options)
            self.close()
            self._env = textworld.start(options.path, textworld.EnvInfos(**dict.fromkeys(INFOS, True)))
            self._state = self._env.reset()
            self._loaded = (task, int(variation))
        except (OSError, CouldNotCompileGameError, QuestGenerationError) as error:
            raise SimulatorError(f"{task}, variation {variation}: {error}") from error

    def _step(self, action: str | None, observation: str) -> Step:
        state = self._state
        score = round(100 * state.score / state.max_score)
        return Step(action, observation, score, state.won or state.lost, state.description, state.inventory)
