"""Retrieval over hand-made train episodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.models.retrieve import Retrieve
from loopwm.records.errors import InputError
from loopwm.records.windows import Window
from tests.fixtures.windows import MakeWindow, episode


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text(
        episode(("go to kitchen", "A stove."), ("look around", "Kitchen: a stove."), ("open oven", "The oven opens."))
        + episode(("go to bathroom", "A bath."), ("look around", "Bathroom: a bath."), ("open door", "It opens."))
        + episode(("go to cellar", "Dark."), ("go up", "Light."), ("look around", "Attic."), goal="Find the attic.")
    )
    return path


def predict(train: Path, window: Window) -> dict[int, str]:
    horizons = range(1, len(window["actions"]) + 1)
    return Retrieve.load([window], [train]).predict([window], "observed", horizons)[0].texts


@pytest.mark.parametrize(("seen", "expected"), [("A stove.", "Kitchen: a stove."), ("A bath.", "Bathroom: a bath.")])
def test_the_same_action_is_told_apart_by_what_was_last_seen(
    make_window: MakeWindow, train: Path, seen: str, expected: str
) -> None:
    window = make_window(history=[(None, "Start."), ("go there", seen)], actions=["look around"])
    assert predict(train, window) == {1: expected}


def test_deferred_actions_tell_what_was_not_shown(make_window: MakeWindow, train: Path) -> None:
    window = make_window(history=[(None, "Start.")], actions=["go to bathroom", "look around", "open door"])
    assert predict(train, window) == {1: "A bath.", 2: "Bathroom: a bath.", 3: "It opens."}


def test_an_action_never_seen_takes_the_most_similar_one(make_window: MakeWindow, train: Path) -> None:
    assert predict(train, make_window(actions=["open the oven"]))[1] == "The oven opens."


def test_nothing_in_common_still_predicts(make_window: MakeWindow, train: Path) -> None:
    window = make_window(history=[(None, "zzz")], goal="zzz", actions=["xyzzy"])
    assert predict(train, window)[1]


def test_the_history_tells_apart_only_where_it_is_shown(make_window: MakeWindow, tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text(
        episode(("read", "ten"), ("wait", "Ok."), ("read", "twenty"))
        + episode(("read", "two"), ("wait", "Ok."), ("read", "four"))
    )
    for first, then in (("ten", "twenty"), ("two", "four")):
        window = make_window(history=[(None, "Start."), ("read", first), ("wait", "Ok.")], actions=["read"])
        assert predict(train, window) == {1: then}


def test_of_equal_places_the_first_is_taken(make_window: MakeWindow, tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text("".join(episode(("open box", f"Animal {n}.")) for n in range(40)))
    assert predict(train, make_window(actions=["open box"])) == {1: "Animal 0."}


def test_identity_is_of_the_episodes_and_not_of_their_files(
    make_window: MakeWindow, train: Path, tmp_path: Path
) -> None:
    def identity(*paths: Path) -> object:
        retrieve = Retrieve.load([make_window()], paths)
        return retrieve.identity

    first, *rest = train.read_text().splitlines(keepends=True)
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text(first)
    b.write_text("".join(rest))
    assert identity(a, b) == identity(train) != identity(a)


def test_train_episodes_of_the_environment_are_needed(make_window: MakeWindow, train: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--train-episodes: must be given for retrieval"):
        Retrieve.load([make_window()], [])
    with pytest.raises(InputError, match="must hold episodes of 'alfworld'"):
        Retrieve.load([make_window(env="alfworld")], [train])
    dev = tmp_path / "dev.jsonl"
    dev.write_text(episode(("go", "A."), split="dev"))
    with pytest.raises(InputError, match=r"dev.jsonl: line 1: split"):
        Retrieve.load([make_window()], [dev])
    dev.write_text(episode(("go", "A.")) + episode((" ", "A.")))
    with pytest.raises(InputError, match=r"dev.jsonl: line 2: steps\[1\].action: must not be empty"):
        Retrieve.load([make_window()], [dev])
