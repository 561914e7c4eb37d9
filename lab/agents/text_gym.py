"""Simulators as Gymnasium environments, such as `gymnasium.make("lab.agents.text_gym:lab/scienceworld-v0")`."""

from __future__ import annotations

from typing import Any

import gymnasium

import lab.agents.text_arrays  # noqa: F401 - AsyncVectorEnv needs it
from data_prep.environments import ENVIRONMENTS, make_environment
from loopwm.records.episodes import Step
from loopwm.worlds.gym import MAX_ACTION, MAX_OBSERVATION, AnyText


class TextEnv(gymnasium.Env[str, str]):
    """Text environment. Rewards are score differences in points. Infos of a reset: goal, task, family and variation."""

    def __init__(self, name: str, split: str = "train", admissible: bool = False) -> None:
        """Start the simulator.

        split: of the episodes drawn. admissible: adds valid actions to `info`, which may cost more than a step.
        Raises InputError for an unknown name or a simulator that cannot start.
        """
        self.observation_space = AnyText(MAX_OBSERVATION, min_length=0)
        self.action_space = AnyText(MAX_ACTION)
        self._env = make_environment(name)
        self._split, self._admissible = split, admissible
        self._score = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode. options: a "task" and a "variation" of it; missing ones are drawn."""
        super().reset(seed=seed)
        named = options or {}
        tasks = self._env.tasks()
        task = named.get("task") or tasks[int(self.np_random.integers(len(tasks)))]
        variation = named.get("variation")
        if variation is None:
            there = self._env.variations(task, self._split)
            variation = there[int(self.np_random.integers(len(there)))]
        step = self._env.reset(task, variation)
        self._score = step.score
        family = next((name for name, tasks in self._env.families.items() if task in tasks), None)
        info = {"goal": self._env.goal(), "task": task, "family": family, "variation": variation}
        return step.observation, {**info, **self._info()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        step: Step = self._env.step(action)
        reward, self._score = step.score - self._score, step.score
        return step.observation, reward, step.done, False, self._info()

    def close(self) -> None:
        self._env.close()

    def _info(self) -> dict[str, Any]:
        return {"admissible": self._env.valid_actions()} if self._admissible else {}


for _name in ENVIRONMENTS:
    gymnasium.register(f"lab/{_name}-v0", entry_point="lab.agents.text_gym:TextEnv", kwargs={"name": _name})
