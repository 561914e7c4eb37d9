"""The agent that searches: its steps in a small kitchen, what a table learns, and where the model looks first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from data_prep.environments import ENVIRONMENTS
from lab.__main__ import main
from lab.agents.real_world import Game, RealWorld
from lab.agents.searcher import Goal, Searcher, parse_goal
from lab.studies.search import ARMS, Imagined, Table, listed, measure, play_game, shuffled
from loopwm.records.episodes import Episode, write_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import PACKAGED
from loopwm.records.template import Context, Transition
from loopwm.text.world import WorldModel
from loopwm.worlds.local import LocalWorlds
from tests.fixtures.kitchen import START, Kitchen

SIGHTS = {"go to fridge 1": "The fridge 1 is closed.", "go to desk 1": "On the desk 1, you see nothing."}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[RealWorld]:
    monkeypatch.setitem(ENVIRONMENTS, "kitchen", Kitchen)
    with RealWorld("kitchen") as real:
        yield real


@pytest.mark.parametrize(
    ("sentence", "goal"),
    [
        ("put some mug on shelf.", Goal("mug", "shelf")),
        ("put a pen in drawer.", Goal("pen", "drawer")),
        ("heat some egg and put it in fridge.", Goal("egg", "fridge", verb="heat")),
        ("put a hot egg in fridge.", Goal("egg", "fridge", verb="heat")),
        ("put a cool pan in cabinet.", Goal("pan", "cabinet", verb="cool")),
        ("put two book in sofa.", Goal("book", "sofa", count=2)),
        ("find two pen and put them in desk.", Goal("pen", "desk", count=2)),
        ("look at creditcard under the desklamp.", Goal("creditcard", lamp="desklamp")),
        ("examine the pen with the desklamp.", Goal("pen", lamp="desklamp")),
    ],
)
def test_goals_are_those_of_the_games(sentence: str, goal: Goal) -> None:
    assert parse_goal(f"Your task is to: {sentence}") == goal


def test_another_goal_is_refused() -> None:
    with pytest.raises(InputError, match=r"must be one of ALFWorld's, got 'boil water'"):
        parse_goal("boil water")


def episode() -> Episode:
    world = Kitchen()
    actions = ["go to countertop 1", "go to fridge 1", "open fridge 1", "examine fridge 1"]
    return Episode(
        "alfworld", "put", "plain", "train", "expert", "goal", (world.reset("put", "plain"), *map(world.step, actions))
    )


def test_an_order_decides_how_many_steps_the_agent_takes(world: RealWorld) -> None:
    arms = {"listed": listed, "table": Table([episode()])}
    line = play_game(world, arms, Game("put", "hot"), 20)
    carried = ["go to microwave 1", "heat mug 1 with microwave 1", "go to cabinet 2", "move mug 1 to cabinet 2"]
    found = ["go to fridge 1", "open fridge 1", "take mug 1 from fridge 1"]
    assert line["table"] == {"actions": [*found, *carried], "won": True, "refused": 0}
    before = ["go to cabinet 2", "go to cabinet 1", "go to countertop 1", "examine countertop 1"]
    assert line["listed"] == {"actions": [*before, *found, *carried], "won": True, "refused": 1}


def test_places_of_the_goals_kind_come_last_unless_the_thing_changes_first(world: RealWorld) -> None:
    line = play_game(world, {"listed": listed}, Game("put", "plain"), 20)
    assert line["listed"]["actions"][:3] == ["go to countertop 1", "go to fridge 1", "open fridge 1"]
    assert line["listed"]["won"]


def test_a_table_counts_the_first_look_into_a_place() -> None:
    assert Table([episode()]).identity == {"looks": 2, "shown": 1}


def test_a_place_that_is_imagined_closed_costs_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def imagine(worlds: Any, actions: list[str]) -> list[SimpleNamespace]:
        return [SimpleNamespace(observation=SIGHTS[action]) for action in actions]

    def chances(worlds: Any, plans: list[list[str]], *_: Any) -> list[float]:
        assert plans == [["go to fridge 1", "open fridge 1"], ["go to desk 1"]]
        return [0.6, 0.4]

    monkeypatch.setattr("lab.studies.search.imagine", imagine)
    monkeypatch.setattr("lab.studies.search.chances", chances)
    worlds: Any = SimpleNamespace(begin=lambda contexts: None)
    assert Imagined(worlds, 12, 0)(Context("goal", "start"), "mug", ["fridge 1", "desk 1"]) == ["desk 1", "fridge 1"]


def test_what_lies_in_its_place_is_not_taken() -> None:
    seen = Transition("go to cabinet 1", "You arrive at cabinet 1. On the cabinet 1, you see a mug 1.")
    context = Context("Your task is to: put two mug in cabinet.", START, (seen,))
    assert Searcher(listed).act(context) == "go to countertop 1"


def test_search_held_out_episodes_are_refused(tmp_path, capsys) -> None:
    write_episodes(tmp_path / "dev.jsonl", [replace(episode(), split="dev")])
    assert main(["search", "--train-episodes", str(tmp_path / "dev.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert "--train-episodes: split: 'dev' in put, must be train" in capsys.readouterr().err


def test_random_orders_are_those_of_a_seed() -> None:
    context, places = Context("goal", "start"), [f"shelf {n}" for n in range(9)]
    order = shuffled(0, context, "mug", places)
    assert sorted(order) == places != order
    assert order == shuffled(0, context, "mug", places[::-1]) != shuffled(1, context, "mug", places)


def test_the_model_looks_for_a_tomato_in_the_fridge_first() -> None:
    room = (
        "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a coffeemachine 1, a "
        "countertop 1, a drawer 1, a fridge 1, a sidetable 1, a sinkbasin 1, and a toaster 1.\n\nYour task is to: "
        "put a clean tomato in sidetable."
    )
    start = Context("Your task is to: put a clean tomato in sidetable.", room)
    worlds = LocalWorlds(WorldModel.from_pretrained(PACKAGED), max_new_tokens=60)
    assert Imagined(worlds, 12, 0)(start, "tomato", ["toaster 1", "drawer 1", "fridge 1"])[0] == "fridge 1"


def test_a_run_leaves_built_games_out_and_compares_by_game(world: RealWorld, tmp_path) -> None:
    arms = {"listed": listed, "random": listed, "table": listed, "model": Table([episode()])}
    spec = {"split": "dev", "max_steps": 20}
    results = measure(world, arms, spec, tmp_path / "run")
    assert tuple(arms) == ARMS
    assert results["n"] == 2
    assert results["arms"]["listed"]["won"]["mean"] == 100
    steps = {arm: row["steps"]["mean"] for arm, row in results["arms"].items()}
    assert results["differences"]["random"]["steps"]["mean"] == steps["model"] - steps["random"] < 0
    assert measure(world, {}, spec, tmp_path / "run")["arms"] == results["arms"]  # nothing is played again
    assert "| model - listed |" in (tmp_path / "run/report.md").read_text(encoding="utf-8")


def test_an_agent_that_has_looked_everywhere_stops() -> None:
    goal = "Your task is to: put some egg on cabinet."
    assert Searcher(lambda context, kind, places: []).act(Context(goal, START)) is None
