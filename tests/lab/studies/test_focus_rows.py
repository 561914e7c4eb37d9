"""Uses of `focus`: drawn by task and outcome, with whether the thing is there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from lab.studies.focus_rows import FOCUS_FACTS, Focuses, focus_taught, outcome_of
from lab.studies.goal_rows import UNKNOWN
from loopwm.records.episodes import Episode, Step

ABSENT = "No known action matches that input."
ROOM = "This room is called the kitchen. In it, you see: a cup."


def use(score: float, observation: str = "You focus on the cup.") -> Step:
    return Step("focus on cup", observation, score, score < 0)


def episode(*uses: Step, task: str = "melt") -> Episode:
    first = Step(None, ROOM, 0, False)
    look = Step("look around", ROOM, 5, False)
    return Episode("scienceworld", task, "0", "train", "focus", "Melt ice.", (first, look, *uses), None)


@pytest.mark.parametrize(
    ("step", "outcome"),
    [
        (use(50), "paid"),
        (use(-100), "lost"),
        (use(5, ABSENT), "absent"),
        (use(5), None),
        (use(5, "Ambiguous request: Please enter the number"), None),
        (replace(use(50), action="open cup"), None),
    ],
)
def test_a_use_pays_loses_or_names_what_is_absent(step, outcome) -> None:
    assert outcome_of(Step("look around", "", 5, False), step) == outcome


def test_outcomes_of_every_task_are_drawn_alike_and_end_the_episode() -> None:
    many = [episode(use(5, ABSENT), use(50)), *[episode(use(5, ABSENT), use(-100))] * 8]
    others = [replace(many[0], env="alfworld"), episode(use(5))]
    assert not Focuses(others)
    focuses = Focuses([*others, *many, episode(use(-100), task="boil")])
    drawn = [focuses.draw(Random(seed)) for seed in range(600)]
    counts = Counter((one.task, outcome_of(*one.steps[-2:])) for one in drawn)
    assert counts.keys() == {("melt", "paid"), ("melt", "lost"), ("melt", "absent"), ("boil", "lost")}
    assert 220 < counts["boil", "lost"] < 380
    assert min(counts["melt", outcome] for outcome in ("paid", "lost", "absent")) > 70


def test_what_is_absent_counts_only_in_a_room_that_was_looked_at() -> None:
    moved = Step("go to hall", "You move to the hall.", 5, False)
    outside = Step("look around", "This outside location is called the outside. Here you see: a tree.", 5, False)
    assert not Focuses([episode(moved, use(5, ABSENT))])
    assert Focuses([episode(moved, outside, Step("wait", "You decide to wait.", 5, False), use(5, ABSENT))])
    assert Focuses([episode(moved, use(50))])


def test_the_fact_is_whether_the_thing_is_there() -> None:
    there, absent = focus_taught(episode(use(50))), focus_taught(episode(use(5, ABSENT)))
    assert there.facts == [(UNKNOWN,), (1,)]
    assert absent.facts == [(UNKNOWN,), (0,)]
    assert there.weights == absent.weights
    assert there.weights[-1] == 1 > there.weights[0]
    assert len(FOCUS_FACTS) == 1
