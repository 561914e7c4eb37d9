"""Candidates are what the simulator calls valid, and the model is judged by what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from lab.studies.acceptance import collect_states, judge
from loopwm.records.episodes import Step
from loopwm.records.template import Context
from loopwm.worlds.protocol import Worlds
from tests.fixtures.toy import Toy


class Corridor(Toy):
    """A corridor whose places have things of their own."""

    def gold_actions(self, task: str, variation: int | str) -> list[str]:
        return [f"go {i}" for i in range(1, 20)]

    def reset(self, task: str, variation: int | str) -> Step:
        self.place = 0
        return super().reset(task, variation)

    def step(self, action: str) -> Step:
        number = action.split()[-1]
        if action.startswith("go"):
            self.place += 1
        elif number.isdecimal() and int(number) != self.place and not action.startswith("look"):
            return Step(action, "Nothing happens.", 0, False)
        return Step(action, f"you {action}", 0, False)

    def valid_actions(self) -> list[str]:
        return ["wait", *(f"{verb} {self.place}" for verb in ("take", "move", "look at"))]


class Refusing:
    """Worlds that refuse some actions."""

    def __init__(self, refused: Sequence[str]) -> None:
        self.refused, self.contexts = refused, list[Context]()

    def begin(self, contexts: Sequence[Context]) -> None:
        self.contexts += contexts

    def fork(self, rows: Sequence[int]) -> Refusing:
        return self

    def step(self, actions: Sequence[str]) -> list[Any]:
        told = ("Nothing happens." if action in self.refused else "Done." for action in actions)
        return [SimpleNamespace(observation=observation) for observation in told]

    def close(self) -> None: ...


def test_candidates_are_valid_at_the_state_or_at_an_earlier_place_only() -> None:
    states = list(collect_states(Corridor(), "test", games=4, candidates=4, seed=1))
    assert [(state["task"], state["variation"]) for state in states] != []
    assert len({(state["task"], state["variation"]) for state in states}) == 4
    for state in states:
        place = len(state["steps"]) - 1
        here = {"wait", f"take {place}", f"move {place}", f"look at {place}"}
        assert [action in here for action, _ in state["candidates"]] == [True, True, False, False]
        assert len({action for action, _ in state["candidates"]}) == 4
        for action, accepted in state["candidates"]:
            assert accepted is (action in here or action.startswith("look"))
            assert action in here or int(action.split()[-1]) < place


def test_games_without_enough_candidates_are_left_out() -> None:
    assert list(collect_states(Corridor(), "test", games=4, candidates=10, seed=1)) == []


def test_what_is_imagined_to_be_refused_is_not_accepted() -> None:
    steps = [[None, "a hall"], ["wait", "you wait"]]
    state = {"goal": "stop", "steps": steps, "candidates": [["a", True], ["b", True], ["c", False]]}
    worlds = Refusing(["b", "c"])
    assert judge(cast(Worlds, worlds), state) == [(True, True), (False, True), (False, False)]
    (context,) = worlds.contexts
    assert (context.goal, context.observation) == ("stop", "a hall")
    assert [(step.action, step.observation) for step in context.history] == [("wait", "you wait")]
