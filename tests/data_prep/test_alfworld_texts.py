"""Hidden states, lists and the expert of ALFWorld, without the engine."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from data_prep.environments.alfworld.expert import Situation, make_plan, parse_goal
from data_prep.environments.alfworld.hidden import describe, listed
from data_prep.environments.base import SimulatorError

SUITE = Path(__file__).parents[2] / "eval/suites/alfworld-500.jsonl.gz"
FACTS = [
    ["atlocation", "agent1", "loc start"],
    ["receptacleatlocation", "shelf 1", "loc 1"],
    ["receptacleatlocation", "fridge 1", "loc 2"],
    ["receptacleatlocation", "shelf 10", "loc 3"],
    ["receptacleatlocation", "shelf 2", "loc 3"],
    ["openable", "fridge 1"],
    ["inreceptacle", "mug 1", "fridge 1"],
    ["inreceptacle", "desklamp 1", "shelf 2"],
    ["inreceptacle", "pen 1", "nowhere 1"],
    ["toggleable", "desklamp 1"],
    ["ishot", "mug 1"],
    ["isclean", "mug 1"],
    *(["cancontain", f"{place}type", "mugtype"] for place in ("shelf", "fridge")),
]
COOL_MUG = "(:goal (objectType ?o MugType) (receptacleType ?r ShelfType) (isCool ?o))"


def test_the_hidden_state_tells_what_the_answers_depend_on_in_the_games_order() -> None:
    facts = [
        *FACTS,
        ["inreceptacle", "mug 2", "shelf 2"],
        ["inreceptacle", "mug 10", "shelf 2"],
        ["objectatlocation", "mug 2", "loc 3"],
        ["not_inreceptacle", "mug 2", "shelf 10"],
        ["not_inreceptacle", "mug 1", "shelf 10"],
        ["not_inreceptacle", "mug 1", "shelf 1"],
        ["inreceptacleobject", "pen 1", "mug 2"],
    ]
    hidden = describe(Situation.of(facts))
    assert hidden.splitlines() == [
        "The fridge 1 is closed. In it, you see a mug 1.",
        "On the shelf 10, you see nothing.",
        "On the shelf 2, you see a desklamp 1, a mug 10, and a mug 2.",
        "On the shelf 1, you see nothing.",
        "Facing the shelf 10, and shelf 2. Next to it, you see a mug 2. "
        "You took a mug 2, and a mug 1 from the shelf 10.",
        "In the mug 2, you see a pen 1.",
        "The desklamp 1 is off.",
        "The mug 1 is hot and clean.",
    ]


def listings(text: str) -> list[list[str]]:
    """The names of each list in a text that has two or more."""
    return [re.findall(r"[a-z]+ \d+", names) for names in re.findall(r"(?:see|facing the) ([^.]*, and [^.]*)\.", text)]


def test_recorded_lists_stand_in_the_order_of_the_hidden_state() -> None:
    with gzip.open(SUITE, "rt") as file:
        windows = [json.loads(line) for line in file]
    texts = {text for w in windows for text in (w["look"], *(step["observation"] for step in w["history"]))}
    lists = [names for text in texts for names in listings(text)]
    assert len(lists) > 500
    assert all(names == sorted(names, key=listed) for names in lists)


def test_the_expert_searches_and_remembers() -> None:
    goal = parse_goal(COOL_MUG)
    plans = [make_plan(FACTS, goal, (), str(seed)) for seed in range(20)]
    for plan in plans:
        found = plan.index("take mug 1 from fridge 1")
        assert plan[found - 1] == "open fridge 1"
        assert plan[found + 1] == "cool mug 1 with fridge 1"
        assert plan[-1].startswith("move mug 1 to shelf")
    assert len({tuple(plan) for plan in plans}) > 5
    assert "examine shelf 10" in {command for plan in plans for command in plan}  # beside shelf 2, no way to go
    known = make_plan(FACTS, goal, ("fridge 1", "shelf 1"), "0")
    assert known[:3] == ["go to fridge 1", "open fridge 1", "take mug 1 from fridge 1"]


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        (COOL_MUG.replace("Mug", "Hat"), "not solvable: no hat within reach"),
        (COOL_MUG.replace("Shelf", "Safe"), "not solvable: no safe within reach"),
        ("(:goal (isHot ?o))", "goal: not one of the six tasks"),
    ],
)
def test_a_goal_out_of_reach_is_said(goal: str, message: str) -> None:
    with pytest.raises(SimulatorError, match=message):
        make_plan(FACTS, parse_goal(goal), (), "0")
