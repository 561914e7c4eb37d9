"""Candidates are what the simulator calls valid, and the model is judged by what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from eval.scores.intervals import RESAMPLES, SEED
from lab.studies.acceptance import collect_states, f1_interval95, judge, read_states, score
from loopwm.records.episodes import Step
from loopwm.records.errors import InputError
from loopwm.records.template import Context
from loopwm.worlds.protocol import Imagined, Worlds
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

    def step(self, actions: Sequence[str], decode: bool) -> list[Imagined]:
        told = ("Nothing happens." if decode and action in self.refused else "" for action in actions)
        return [
            Imagined(text, acceptance=0.2 if action == "d" else 0.7) for action, text in zip(actions, told, strict=True)
        ]

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


def test_several_states_of_a_game_are_on_one_solution() -> None:
    states = list(collect_states(Corridor(), "test", games=2, candidates=4, seed=1, per_game=3))
    assert len(states) == 6
    for first, *others in (states[:3], states[3:]):
        for one in others:
            assert (one["task"], one["variation"]) == (first["task"], first["variation"])
            assert one["steps"][: len(first["steps"])] == first["steps"]
            assert len(one["steps"]) > len(first["steps"])


def test_games_without_enough_candidates_are_left_out() -> None:
    assert list(collect_states(Corridor(), "test", games=4, candidates=10, seed=1)) == []


def test_what_is_imagined_to_be_refused_is_not_accepted() -> None:
    steps = [[None, "a hall"], ["wait", "you wait"]]
    state = {"goal": "stop", "steps": steps, "candidates": [["a", True], ["b", True], ["c", False], ["d", False]]}
    worlds = Refusing(["b", "c"])
    said = {decode: judge(cast(Worlds, worlds), state, decode) for decode in (True, False)}
    assert [one.truth for one in said[True]] == [True, True, False, False]
    assert [one.accepted for one in said[True]] == [True, False, False, False]
    assert [one.accepted for one in said[False]] == [True, True, True, False]
    context, _ = worlds.contexts
    assert (context.goal, context.observation) == ("stop", "a hall")
    assert [(step.action, step.observation) for step in context.history] == [("wait", "you wait")]


def test_score_counts_what_is_said_of_all_states() -> None:
    candidates = [["a", True], ["b", True], ["c", False], ["d", False]]
    states = [
        {"task": "t", "variation": i, "goal": "stop", "steps": [[None, "a hall"]], "candidates": candidates}
        for i in (1, 2)
    ]
    figures = score(cast(Worlds, Refusing([])), states, decode=False)
    assert (figures["candidates"], figures["accepted"]["f1"], figures["refused"]["recall"]) == (8, 0.8, 0.5)
    assert figures["accepted"]["f1_ci95"] == [0.8, 0.8]
    assert figures["bins"] == [[2, 0.2, 0.0], [6, pytest.approx(0.7), pytest.approx(2 / 3)]]
    assert figures["auroc"] == 0.75


def test_f1_interval_resamples_games_with_all_their_pairs() -> None:
    pairs = [(True, True), (True, False), (False, True), (True, True), (False, False), (True, True)]
    games = ["a", "a", "b", "b", "c", "c"]
    draws = np.random.default_rng(SEED).multinomial(3, [1 / 3] * 3, size=RESAMPLES)
    f1s = []
    for counts in draws:
        resample = [pair for game, count in zip("abc", counts, strict=True) for pair in _of(game, pairs, games) * count]
        hits, wrong = resample.count((True, True)), resample.count((True, False)) + resample.count((False, True))
        f1s.append(hits / (hits + wrong / 2))
    assert f1_interval95(pairs, games) == pytest.approx(np.percentile(f1s, [2.5, 97.5]))
    assert f1_interval95(pairs, games)[0] < 0.7


@pytest.mark.filterwarnings("error")
def test_f1_interval_leaves_out_resamples_without_f1() -> None:
    assert f1_interval95([(False, False)] * 2, ["a", "b"]) is None
    assert f1_interval95([(False, False), (True, True)], ["a", "b"]) == [1, 1]


def test_read_states_names_line_and_missing_field(tmp_path: Path) -> None:
    (tmp_path / "states.jsonl").write_text('{"goal": "stop", "candidates": []}\n')
    with pytest.raises(InputError, match=r"states\.jsonl: line 1: steps: missing"):
        read_states(tmp_path / "states.jsonl")


def _of(game: str, pairs: Sequence[tuple[bool, bool]], games: Sequence[str]) -> list[tuple[bool, bool]]:
    return [pair for pair, name in zip(pairs, games, strict=True) if name == game]
