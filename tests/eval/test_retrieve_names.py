"""`retrieve-names`: places that fit, retold in the names of the place asked about."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from eval.models.alignment import Scene, rename, renaming
from eval.models.retrieve import Retrieve
from eval.models.retrieve_names import RetrieveNames
from eval.scores.metrics import names_of
from loopwm.records.windows import Window
from tests.fixtures.windows import MakeWindow, episode

NAMES = names_of("scienceworld")
assert NAMES is not None
LOOK = "look at inclined plane b"


def predict(train: Path, window: Window) -> list[str]:
    horizons = range(1, len(window["actions"]) + 1)
    return list(RetrieveNames.load([window], [train]).predict([window], "observed", horizons)[0].texts.values())


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: str) -> Path:
        path = tmp_path / "train.jsonl"
        path.write_text("".join(lines))
        return path

    return write


def renamed(text: str, actions: list[tuple[str, str]], there: list[str], here: list[str]) -> str:
    """`text` of a place where `there` was seen, for one where `here` was."""
    assert NAMES is not None
    return rename(text, renaming(actions, [], Scene(there, NAMES), Scene(here, NAMES), NAMES), NAMES)


def test_the_answer_is_told_in_the_names_of_the_action_asked(
    make_window: MakeWindow, write: Callable[..., Path]
) -> None:
    train = write(
        episode(
            ("look around", "a steel block."),
            ("move apple seed to flower pot 3", "You move the apple seed to the flower pot 3."),
        )
    )
    window = make_window(
        history=[(None, "Start."), ("look around", "a wood block.")], actions=["move lemon seed to flower pot 2"]
    )
    assert predict(train, window) == ["You move the lemon seed to the flower pot 2."]
    plain = Retrieve.load([window], [train]).predict([window], "observed", [1])[0].texts
    assert plain == {1: "You move the apple seed to the flower pot 3."}


def test_a_short_name_means_what_was_seen_last_that_ends_with_it() -> None:
    moved = "You move the steel block to the inclined plane."
    same = [("move block to inclined plane b", "move block to inclined plane c")]
    assert renamed(moved, same, ["a steel block"], ["a wood block"]) == "You move the wood block to the inclined plane."
    assert renamed(moved, same, ["a steel block"], ["a brick"]) == moved
    other = [("move block to inclined plane b", "move brick to inclined plane b")]
    assert renamed(moved, other, ["a steel block"], ["nothing"]) == "You move the brick to the inclined plane."


def test_names_change_places_at_once_and_keep_their_spelling() -> None:
    swapped = [("connect red wire to blue wire", "connect blue wire to red wire")]
    assert renamed("Red wire, red box, blue wire.", swapped, [], []) == "blue wire, red box, red wire."
    letters = [("pick up vial c", "pick up vial d")]
    told = renamed("vial C, mark c", letters, [], ["a vial D"])
    assert told == "vial D, mark c"


def test_letters_beyond_ascii_are_no_case_of_a_name() -> None:
    assert renamed("a \u017fink, a SINK", [("open sink", "open fridge")], [], []) == "a \u017fink, a fridge"


def test_a_name_inside_a_longer_one_stays() -> None:
    action = [("open freezer", "open fridge")]
    text = "The freezer is open, the ultra low temperature freezer is not."
    assert renamed(text, action, [], []) == "The fridge is open, the ultra low temperature freezer is not."


def test_earlier_actions_rename_only_what_the_place_asked_about_does_not_know() -> None:
    actions = [("look around", "look around"), ("pick up brick", "pick up steel block")]
    assert renamed("a brick", actions, ["a brick"], ["a steel block"]) == "a steel block"
    assert renamed("a brick", actions, ["a brick"], ["a steel block, a brick"]) == "a brick"
    assert renamed("a brick", actions, ["a steel block, a brick"], ["a steel block"]) == "a brick"


def plane(percent: int, block: str = "steel block", name: str = "b") -> tuple[str, str]:
    """A look at a plane, and what it told."""
    told = f"an inclined plane {name.upper()}, with: a {block} approximately {percent}% down the plane"
    return f"look at inclined plane {name}", told


def run(speed: float, block: str = "steel block", name: str = "b", first: int = 1) -> list[tuple[str, str]]:
    return [plane(int(speed * tick + 0.5), block, name) for tick in range(first, 14)]


def test_of_known_speeds_the_one_that_fits_the_readings_is_chosen(
    make_window: MakeWindow, write: Callable[..., Path]
) -> None:
    train = write(episode(*run(4.7)), episode(*run(3.1)), episode(*run(6.4)), episode(*run(5.2)))
    for speed in (4.7, 3.1, 6.4):
        truth = [text for _, text in run(speed, "wood block", "c", first=2)]
        seen = run(speed, "wood block", "c", first=2)[:2]
        window = make_window(history=[(None, "a wood block"), *seen], actions=["look at inclined plane c"] * 5)
        assert predict(train, window) == truth[2:7]


@pytest.mark.parametrize(("before", "then"), [(14, 24), (13, 26)])
def test_earlier_readings_tell_apart_what_the_last_one_does_not(
    make_window: MakeWindow, write: Callable[..., Path], before: int, then: int
) -> None:
    train = write(episode(*run(4.7)), episode(*run(6.4)))  # 19 % is a reading of both
    between = [("inventory", "Nothing.")] * 3
    window = make_window(history=[(None, "Start."), plane(before), *between, plane(19)], actions=[LOOK])
    assert predict(train, window) == [plane(then)[1]]


def test_time_passes_only_in_steps_that_take_time(make_window: MakeWindow, write: Callable[..., Path]) -> None:
    refused = ("go to moon", "No known action matches that input.")
    train = write(episode(*run(4.7)), episode(*run(3.1)), episode(refused))
    one, two, _, _, five, six, *_ = run(4.7, first=3)  # the wait takes two ticks
    seen = [one, refused, ("look around", "The workshop."), two, ("wait1", "You decide to wait for 1 iterations.")]
    window = make_window(history=[(None, "a steel block"), *seen], actions=[LOOK, "go to moon", LOOK])
    assert predict(train, window)[::2] == [five[1], six[1]]


def test_readings_that_fit_no_place_are_continued_and_text_without_numbers_repeated(
    make_window: MakeWindow, write: Callable[..., Path]
) -> None:  # fmt: skip
    train = write(episode(*run(4.7)), episode(("open door", "It opens."), ("read", "No.")))
    window = make_window(history=[(None, "Start."), plane(10), plane(33)], actions=[LOOK, LOOK])
    assert predict(train, window) == [plane(56)[1], plane(79)[1]]  # 33 % is known, but at another speed
    window = make_window(history=[(None, "Start."), *[("read", "Yes.")] * 2], actions=["read"])
    assert predict(train, window) == ["Yes."]


@pytest.mark.parametrize("text", ["meter 2024-01-05 08:05", "no. 12345678901234567890", "no. " + "9" * 400])
def test_a_reading_that_stays_is_repeated_to_the_letter(
    make_window: MakeWindow, write: Callable[..., Path], text: str
) -> None:
    wait = ("wait1", "You decide to wait for 1 iterations.")
    train = write(episode(("read", "No.")), episode(wait))
    window = make_window(history=[(None, "Start."), ("read", text), wait, ("read", text), wait], actions=["read"])
    assert predict(train, window) == [text]


def test_readings_between_which_no_time_passed_are_not_continued(
    make_window: MakeWindow, write: Callable[..., Path]
) -> None:
    train = write(episode(("inventory", "Nothing."), ("wait1", "You decide to wait for 1 iterations.")))
    seen = [("inventory", "a flower pot 7"), ("inventory", "a flower pot 8")]
    window = make_window(history=[(None, "Start."), *seen], actions=["wait1", "inventory"])
    assert predict(train, window)[1] == "a flower pot 8"


def test_an_answer_to_another_verb_is_not_taken_while_there_is_one(
    make_window: MakeWindow, write: Callable[..., Path]
) -> None:
    train = write(
        episode(("look", "a hall"), ("close red door", "It closes.")),
        episode(("dance", "x"), ("open box", "It opens.")),
    )
    window = make_window(history=[(None, "Start."), ("look", "a hall")], actions=["open red door"])
    assert predict(train, window) == ["It opens."]
    assert re.match("It|a|x", predict(train, make_window(actions=["sing"]))[0])


def test_numbered_names_are_renamed_whole(make_window: MakeWindow, write: Callable[..., Path]) -> None:
    train = write(episode(("take mug 1 from desk 1", "You pick up the mug 1 from the desk 1."), env="alfworld"))
    window = make_window(history=[(None, "mug 11")], actions=["take mug 11 from desk 2"], env="alfworld")
    assert predict(train, window) == ["You pick up the mug 11 from the desk 2."]


def test_without_known_names_the_answer_stays(make_window: MakeWindow, write: Callable[..., Path]) -> None:
    train = write(episode(("pick up red wire", "red wire"), env="elsewhere"))
    assert predict(train, make_window(actions=["pick up blue wire"], env="elsewhere")) == ["red wire"]
