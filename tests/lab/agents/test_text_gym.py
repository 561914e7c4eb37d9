"""The simulators as Gymnasium environments, and as what puts an imagined one right."""

from __future__ import annotations

import gymnasium
import pytest
from gymnasium.spaces.utils import flatten, flatten_space, unflatten

from lab.agents import text_gym
from loopwm.records.episodes import Step
from loopwm.worlds.gym import AnyText

SCIENCEWORLD = "lab.agents.text_gym:lab/scienceworld-v0"


class Ladder:
    """A simulator with a ladder of so many rungs as the variation says."""

    families = {"climbing": ("climb",)}  # noqa: RUF012 - as simulators declare it

    def tasks(self) -> list[str]:
        return ["climb"]

    def variations(self, task: str, split: str) -> list[int]:
        return {"train": [2], "dev": [4]}[split]

    def reset(self, task: str, variation: int) -> Step:
        self.height, self.rungs = 0, variation
        return Step(None, "below", 0.0, False)

    def goal(self) -> str:
        return "climb"

    def step(self, action: str) -> Step:
        self.height += action == "up"
        return Step(action, f"rung {self.height}", 100.0 * self.height / self.rungs, self.height == self.rungs)

    def valid_actions(self) -> list[str]:
        return ["up", "wait"]

    def close(self) -> None:
        pass


@pytest.fixture
def ladder(monkeypatch) -> None:
    monkeypatch.setattr(text_gym, "make_environment", lambda name: Ladder())


def test_an_episode_of_a_simulator_is_gymnasiums(ladder):
    env = text_gym.TextEnv("ladder", split="dev", admissible=True)
    told = {"goal": "climb", "task": "climb", "family": "climbing", "variation": 4, "admissible": ["up", "wait"]}
    assert env.reset(seed=0) == ("below", told)
    assert env.step("up") == ("rung 1", 25.0, False, False, {"admissible": ["up", "wait"]})
    assert env.reset(options={"task": "climb", "variation": 1})[1]["variation"] == 1
    assert env.step("up")[1:4] == (100.0, True, False)
    assert "admissible" not in text_gym.TextEnv("ladder").reset()[1]


def test_simulators_step_in_processes_of_their_own(ladder):
    envs = gymnasium.vector.AsyncVectorEnv([lambda: text_gym.TextEnv("ladder")] * 2)
    try:
        assert envs.reset(seed=0)[0] == ("below", "below")
        observations, rewards, ends, _, _ = envs.step(("caf\u00e9\n\u2603", "up"))
        assert observations == ("rung 0", "rung 1")
        assert (rewards.tolist(), ends.tolist()) == ([0.0, 50.0], [False, False])
    finally:
        envs.close()


def test_texts_are_arrays_of_code_points_and_back():
    space = AnyText(100, min_length=0)
    for text in ("", "a\tb\n", "\u2603 \U0001f600"):
        array = flatten(space, text)
        assert flatten_space(space).contains(array)
        assert unflatten(space, array) == text


@pytest.mark.slow
def test_scienceworld_lists_what_can_be_done():
    env = gymnasium.make(SCIENCEWORLD, admissible=True)
    try:
        observation, info = env.reset(seed=0, options={"task": "boil"})
        assert "boil" in info["goal"]
        assert observation
        assert "look around" in info["admissible"]
        assert isinstance(env.step(info["admissible"][0])[0], str)
    finally:
        env.close()
