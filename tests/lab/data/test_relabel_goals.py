"""Steps of ALFWorld under other goals: what reaches a goal follows from what is where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from data_prep.solutions import PACKED
from lab.__main__ import main
from lab.agents.searcher import Goal, parse_goal
from lab.data.relabel_goals import Ledger, exchanged, first_places, other_goals, reached_at, sentence, under
from lab.data.unpack import unpack
from loopwm.records.episodes import Episode, Step, recorded_episodes, write_episodes
from loopwm.records.errors import InputError

GOALS = [
    Goal("mug", "desk"),
    Goal("mug", "desk", count=2),
    Goal("mug", "desk", verb="clean"),
    Goal("egg", "desk", verb="heat"),
    Goal("egg", "desk", verb="cool"),
    Goal("mug", lamp="desklamp"),
]
HIDDEN = "On the desk 1, you see a egg 1.\nOn the shelf 1, you see a desklamp 1, a mug 2, and a mug 1."
ROOM = "You are in the middle of a room. Looking quickly around you, you see a desk 1, and a shelf 1."


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Episode]:
    folder = tmp_path_factory.mktemp("episodes")
    unpack(PACKED / "alfworld-dev-expert.tar.xz", folder)
    return recorded_episodes([folder])


def played(goal: str, *steps: tuple[str, str]) -> Episode:
    first = Step(None, f"{ROOM}\n\n{goal}", 0, False)
    taken = [Step(action, text, 0, False) for action, text in steps]
    return Episode("alfworld", "any", "valid_train/any", "train", "expert", goal, (first, *taken), HIDDEN)


TO_DESK = "Your task is to: put a mug in desk."
TAKE = ("take mug 1 from shelf 1", "You pick up the mug 1 from the shelf 1.")
MOVE = ("move mug 1 to desk 1", "You move the mug 1 to the desk 1.")
CLEAN = ("clean mug 1 with sinkbasin 1", "You clean the mug 1 using the sinkbasin 1.")
HEAT = ("heat mug 1 with microwave 1", "You heat the mug 1 using the microwave 1.")
COOL = ("cool mug 1 with fridge 1", "You cool the mug 1 using the fridge 1.")
GO = ("go to shelf 1", "You arrive at shelf 1. On the shelf 1, you see a desklamp 1, a mug 2, and a mug 1.")
LIGHT = ("use desklamp 1", "You turn on the desklamp 1.")


def test_goals_are_reached_where_the_games_ended(recorded: list[Episode]) -> None:
    """Of one game the rules are not known: it ends when a mug is cooled that was never put anywhere."""
    ends = [(reached_at(one, parse_goal(one.goal)), len(one.steps) - 1) for one in recorded if one.steps[-1].done]
    assert len(ends) == 121
    assert [end for end in ends if end[0] != end[1]] == [(None, 12)]


@pytest.mark.parametrize(
    ("goal", "steps", "end"),
    [
        (Goal("mug", "desk"), (TAKE, MOVE), 2),
        (Goal("egg", "desk"), (TAKE, MOVE), 0),
        (Goal("mug", "shelf", count=2), (TAKE, MOVE), 0),
        (Goal("mug", "desk", count=2), (TAKE, MOVE), None),
        (Goal("mug", "desk", verb="clean"), (TAKE, MOVE), None),
        (Goal("mug", "desk", verb="clean"), (TAKE, CLEAN, MOVE), 3),
        (Goal("mug", "desk", verb="heat"), (TAKE, HEAT, COOL, MOVE), None),
        (Goal("mug", lamp="desklamp"), (GO, TAKE, LIGHT), 3),
        (Goal("egg", lamp="desklamp"), (GO, TAKE, LIGHT), None),
        (Goal("mug", "desk"), (TAKE, (MOVE[0], "Nothing happens.")), None),
    ],
)
def test_a_goal_is_reached_by_what_is_where(goal: Goal, steps: tuple[tuple[str, str], ...], end: int | None) -> None:
    assert reached_at(played(TO_DESK, *steps), goal) == end


def test_two_things_are_asked_for_in_one_place() -> None:
    apart = Ledger({"mug 1": "desk 1", "mug 2": "desk 2"})
    assert not apart.reaches(Goal("mug", "desk", count=2))
    assert Ledger({"mug 1": "desk 2", "mug 2": "desk 2"}).reaches(Goal("mug", "desk", count=2))


def test_first_places_are_those_before_anything_was_taken() -> None:
    episode = played(TO_DESK, TAKE, MOVE)
    later = "On the desk 1, you see a egg 1, and a mug 1.\nOn the shelf 1, you see a desklamp 1, and a mug 2."
    steps = (*episode.steps[:-1], replace(episode.steps[-1], hidden_state=later))
    assert first_places(replace(episode, hidden_state=None, steps=steps)) == first_places(episode)
    with pytest.raises(InputError, match="no hidden state"):
        first_places(replace(episode, hidden_state=None))


def test_an_episode_ends_where_another_goal_is_reached() -> None:
    episode = played("Your task is to: put a clean mug in desk.", TAKE, MOVE, GO)
    other = under(episode, Goal("mug", "desk"), Random(0))
    assert other is not None
    assert [(step.score, step.done) for step in other.steps] == [(0, False), (0, False), (100, True)]
    assert parse_goal(other.goal) == Goal("mug", "desk")
    assert other.goal in other.steps[0].observation
    assert episode.goal not in other.steps[0].observation


def test_a_goal_that_is_missed_pays_nothing() -> None:
    won = played(TO_DESK, TAKE, MOVE)
    won = replace(won, steps=(*won.steps[:-1], replace(won.steps[-1], score=100, done=True)))
    other = under(won, Goal("egg", "shelf"), Random(0))
    assert other is not None
    assert [(step.score, step.done) for step in other.steps] == [(0, False)] * 3


def test_a_goal_that_is_reached_at_the_start_is_left_out() -> None:
    assert under(played(TO_DESK, TAKE, MOVE), Goal("egg", "desk"), Random(0)) is None


@pytest.mark.parametrize("goal", GOALS)
def test_sentences_say_the_goal(goal: Goal) -> None:
    for seed in range(8):
        assert parse_goal(sentence(goal, Random(seed))) == goal


def test_what_was_put_down_is_a_goal_too() -> None:
    assert Goal("mug", "desk") in other_goals(played("Your task is to: put a egg in shelf.", TAKE, MOVE), Random(0))


def test_a_lamp_that_was_turned_off_does_not_light() -> None:
    ledger = Ledger({"mug 1": "shelf 1"}, here="shelf 1", held="mug 2")
    for text in ("You turn on the desklamp 1.", "You turn off the desklamp 1."):
        ledger.read(Step("use desklamp 1", text, 0, False))
    assert not ledger.reaches(Goal("mug", lamp="desklamp"))


def test_the_command_writes_episodes_that_pay_and_others(tmp_path: Path, recorded: list[Episode]) -> None:
    write_episodes(tmp_path / "in.jsonl", recorded[::6])
    assert main(["relabel-goals", "--episodes", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out")]) == 0
    made = recorded_episodes([tmp_path / "out"])
    assert {one.policy for one in made} == {"other-goal"}
    assert {one.steps[-1].done for one in made} == {True, False}
    assert len({one.variation for one in made}) == len(made)
    for one in made:
        end = reached_at(one, parse_goal(one.goal))
        assert end == (len(one.steps) - 1 if one.steps[-1].done else None)


def ends_at(
    action: str, score: float, goal: str = "If it melts, use the red box. If not, use the blue box."
) -> Episode:
    """An episode of ScienceWorld."""
    steps = (
        Step(None, "A room.", 0, False),
        Step("look around", "A room.", 50, False),
        Step(action, "Done.", score, True),
    )
    return Episode("scienceworld", "melt", 3, "train", "gold", goal, steps)


def test_exchanged_boxes_lose_what_was_won() -> None:
    other = exchanged(ends_at("focus on red box", 100))
    assert other is not None
    assert other.goal == "If it melts, use the blue box. If not, use the red box."
    assert other.steps[-1] == Step("focus on red box", "Done.", -100, True)
    assert (other.policy, other.steps[:-1]) == ("other-goal", ends_at("focus on red box", 100).steps[:-1])
    assert other.variation != 3


@pytest.mark.parametrize(
    "episode",
    [
        ends_at("focus on red box", -100),
        ends_at("focus on thermometer", 100),
        ends_at("move it to red box", 100, "Move it to the red box."),
    ],
)
def test_boxes_are_exchanged_where_the_right_one_of_two_ends_the_game(episode: Episode) -> None:
    assert exchanged(episode) is None


def test_the_command_takes_both_worlds(tmp_path: Path, recorded: list[Episode]) -> None:
    write_episodes(tmp_path / "in.jsonl", [*recorded[:2], ends_at("focus on red box", 100), ends_at("wait", 100)])
    assert main(["relabel-goals", "--episodes", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out")]) == 0
    made = [one.env for one in recorded_episodes([tmp_path / "out"])]
    assert made.count("scienceworld") == 1 < made.count("alfworld")


def test_episodes_of_other_worlds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_episodes(tmp_path / "in.jsonl", [replace(played(TO_DESK, TAKE), env="textworld")])
    assert main(["relabel-goals", "--episodes", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert "must be of alfworld or scienceworld, got textworld" in capsys.readouterr().err
