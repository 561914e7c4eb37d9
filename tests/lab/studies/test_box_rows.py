"""Episodes that answer by a box: drawn right and wrong, in other colours, with what decides."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from lab.studies.box_rows import BOX_FACTS, COLOURS, Boxes, box_taught, recoloured
from lab.studies.goal_rows import UNKNOWN
from loopwm.records.episodes import Episode, Step


def answer(chosen: str, score: float = 100, task: str = "melt") -> Episode:
    """An episode that measures something and chooses a box."""
    goal = "If it melts, focus on the red box. If it does not, focus on the blue box."
    first = Step(None, "You see a red box, a blue box and a red wire.", 0, False)
    look = Step("look around", "Ice in a red box.", 20, False)
    last = Step(f"focus on {chosen} box", f"You focus on the {chosen} box.", score, True)
    return Episode("scienceworld", task, f"{task}/{chosen}", "train", "gold", goal, (first, look, last), None)


@pytest.mark.parametrize(
    ("episode", "chosen", "holds"),
    [(answer("red"), "red", 1), (answer("blue"), "blue", 0), (answer("red", -100), "red", 0)],
)
def test_facts_are_the_goals_boxes_and_what_was_chosen_and_measured(episode, chosen, holds) -> None:
    taught = box_taught(episode)
    red, blue = (1 + COLOURS.index(colour) for colour in ("red", "blue"))
    assert taught.facts == [[red, blue, 0, UNKNOWN], [red, blue, 1 + COLOURS.index(chosen), holds]]
    assert taught.weights[-1] == 1 > taught.weights[0]
    assert all(value < size for value, size in zip(taught.facts[-1], BOX_FACTS, strict=True))


def test_a_new_colour_is_the_same_in_all_of_an_episode() -> None:
    for seed in range(9):
        new = recoloured(answer("red"), Random(seed))
        if_so, if_not = re.findall(r"(\w+) box", new.goal)
        assert if_so != if_not
        assert [(step.action, step.observation) for step in new.steps] == [
            (None, f"You see a {if_so} box, a {if_not} box and a red wire."),
            ("look around", f"Ice in a {if_so} box."),
            (f"focus on {if_so} box", f"You focus on the {if_so} box."),
        ]
        assert box_taught(new).facts[-1][-1] == 1


def test_right_and_wrong_boxes_of_every_task_are_drawn_alike() -> None:
    others = [replace(answer("red"), env="alfworld"), answer("red", 0), answer("blue", -100)]
    assert not Boxes(others)
    boxes = Boxes([*others, *[answer("red")] * 5, answer("blue", task="test")])
    drawn = Counter((one.task, one.steps[-1].score) for one in map(boxes.draw, map(Random, range(400))))
    assert drawn.keys() == {(task, score) for task in ("melt", "test") for score in (100, -100)}
    assert min(drawn.values()) > 70
