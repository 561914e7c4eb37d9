"""The rules of ALFWorld, played by `track`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.models.track import NOTHING, Track
from loopwm.records.errors import InputError
from tests.fixtures.windows import MakeWindow

ROOM = (
    "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see a "
    "desk 1, a drawer 10, a drawer 2, a fridge 1, a microwave 1, a sinkbasin 1, and a shelf 1.\n\nYour task is to: x."
)
AT_DESK = ("go to desk 1", "You arrive at desk 1. On the desk 1, you see a cd 1, a desklamp 1, and a mug 2.")
AT_DRAWER = ("go to drawer 2", "You arrive at drawer 2. The drawer 2 is closed.")
OPENED = (
    "open drawer 2",
    "You open the drawer 2. The drawer 2 is open. In it, you see a pen 10, a pen 9, a pen 1, and a pencil 1.",
)
TAKEN = ("take mug 2 from desk 1", "You pick up the mug 2 from the desk 1.")
Play = Callable[..., list[str]]


@pytest.fixture
def play(make_window: MakeWindow) -> Play:
    """Answers to deferred actions after a history."""

    def answers(
        history: list[tuple[str, str]], *actions: str, context_kind: Any = "observed", **fields: Any
    ) -> list[str]:
        window = make_window(history=[(None, ROOM), *history], actions=list(actions), env="alfworld", **fields)
        return list(Track().predict([window], context_kind, range(1, len(actions) + 1))[0].texts.values())

    return answers


def test_what_was_seen_is_told_again_with_what_the_actions_changed(play: Play) -> None:
    history = [AT_DRAWER, OPENED, AT_DESK]
    moving = ("take cd 1 from desk 1", "go to drawer 2", "move cd 1 to drawer 2", "examine drawer 2", "close drawer 2")
    assert play(history, *moving, "go to desk 1") == [
        "You pick up the cd 1 from the desk 1.",
        "You arrive at drawer 2. The drawer 2 is open. In it, you see a pen 10, a pen 9, a pen 1, and a pencil 1.",
        "You move the cd 1 to the drawer 2.",
        "The drawer 2 is open. In it, you see a cd 1, a pen 10, a pen 9, a pen 1, and a pencil 1.",
        "You close the drawer 2.",
        "You arrive at desk 1. On the desk 1, you see a desklamp 1, and a mug 2.",
    ]  # fmt: skip


def test_what_was_never_seen_is_guessed_to_be_closed_or_empty(play: Play) -> None:
    assert play([], "look", "go to fridge 1", "open fridge 1", "go to shelf 1") == [
        "You are in the middle of a room. Looking quickly around you, you see nothing.",
        "You arrive at fridge 1. The fridge 1 is closed.",
        "You open the fridge 1. The fridge 1 is open. In it, you see nothing.",
        "You arrive at shelf 1. On the shelf 1, you see nothing.",
    ]


@pytest.mark.parametrize(
    ("history", "action"),
    [
        ([AT_DRAWER, OPENED], "open drawer 2"),
        ([AT_DRAWER], "close drawer 2"),
        ([AT_DRAWER], "take pen 9 from drawer 2"),  # closed
        ([AT_DRAWER, OPENED], "take cd 1 from drawer 2"),  # not in it
        ([AT_DESK, TAKEN], "take cd 1 from desk 1"),  # hands full
        ([AT_DESK], "move cd 1 to desk 1"),  # not held
        ([AT_DESK, TAKEN, AT_DRAWER], "move mug 2 to drawer 2"),  # closed
        ([AT_DESK, TAKEN], "heat mug 2 with microwave 1"),  # elsewhere
        ([AT_DESK, TAKEN, ("go to fridge 1", "You arrive at fridge 1.")], "heat mug 2 with fridge 1"),
        ([AT_DESK], "go to desk 1"),  # there already
        ([AT_DESK], "examine pen 9"),
        ([AT_DESK], "use cd 1"),
        ([AT_DESK, AT_DRAWER], "use desklamp 1"),  # left on the desk
        ([AT_DESK], "go to moon"),
        ([AT_DESK], "open unicorn"),
        ([AT_DESK], "look at unicorn"),
        ([AT_DESK], "xyzzy 1"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_changes_nothing(play: Play, history: list[tuple[str, str]], action: str) -> None:
    refused, *after = play(history, action, "inventory", "look")
    assert refused == NOTHING
    assert after == play(history, "inventory", "look")


def test_a_refusal_in_the_history_changes_nothing(play: Play) -> None:
    refused = [AT_DESK, TAKEN, ("move mug 2 to shelf 1", NOTHING)]
    assert play(refused, "inventory") == ["You are carrying: a mug 2."]


def test_texts_that_are_not_the_games_do_no_harm(play: Play) -> None:
    odd = [("go to moon", "You fly."), ("look", "You are facing the ."), ("move x to desk 1", "Ok."), ("", "")]
    assert play(odd, "look", "go to desk 1")[1] == "You arrive at desk 1. On the desk 1, you see nothing."


def test_places_seen_together_are_reached_together(play: Play) -> None:
    facing = ("look", "You are facing the drawer 10, and drawer 2. Next to it, you see nothing.")
    actions = ("examine drawer 10", "go to drawer 10", "go to desk 1", "go to drawer 10", "look")
    assert play([AT_DRAWER, facing], *actions) == [
        "The drawer 10 is closed.",
        NOTHING,
        "You arrive at desk 1. On the desk 1, you see nothing.",
        "You arrive at drawer 10. The drawer 10 is closed.",
        "You are facing the drawer 10, and drawer 2. Next to it, you see nothing.",
    ]  # fmt: skip


def test_examine_tells_what_was_done_to_a_thing(play: Play) -> None:
    taken = [AT_DESK, ("take cd 1 from desk 1", "You pick up the cd 1 from the desk 1.")]
    examined = "examine cd 1"
    assert play(
        taken, examined, "go to sinkbasin 1", "clean cd 1 with sinkbasin 1", examined, "go to microwave 1",
        "heat cd 1 with microwave 1", examined, "go to fridge 1", "cool cd 1 with fridge 1", examined,
    )[::3] == ["There's nothing special about cd 1.", "This is a clean cd 1.", "This is a hot and clean cd 1.",
               "This is a cool and clean cd 1."]  # fmt: skip
    lamp = play([AT_DESK], "examine desklamp 1", "use desklamp 1", "examine desklamp 1", "examine mug 2")
    assert lamp == ["This desklamp 1 is off.", "You turn on the desklamp 1.", "This desklamp 1 is on.",
                    "This is a normal mug 2. In it, you see nothing."]  # fmt: skip


def test_heating_takes_away_the_cold(play: Play) -> None:
    taken = [AT_DESK, ("take cd 1 from desk 1", "You pick up the cd 1 from the desk 1.")]
    cooled = ("go to fridge 1", "cool cd 1 with fridge 1", "go to microwave 1")
    assert play(taken, *cooled, "heat cd 1 with microwave 1", "examine cd 1")[-1] == "This is a hot cd 1."


def test_other_contexts_know_what_they_show(play: Play) -> None:
    now = {"look": f"You are facing the drawer 2. Next to it, you see nothing.\n{OPENED[1].partition('. ')[2]}",
           "inventory": "You are carrying: a mug 2."}  # fmt: skip
    actions = ("inventory", "move mug 2 to drawer 2", "examine drawer 2", "go to desk 1")
    told = play([AT_DESK], *actions, context_kind="snapshot", **now)
    assert told[2] == "The drawer 2 is open. In it, you see a mug 2, a pen 10, a pen 9, a pen 1, and a pencil 1."
    assert told[3].endswith("a cd 1, a desklamp 1, and a mug 2.")  # the last observation is shown, not its order
    hidden = (
        "The drawer 10 is closed. In it, you see a watch 1.\nOn the shelf 1, you see a vase 1.\nThe vase 1 is cold."
    )
    told = play([AT_DESK], "go to drawer 10", "open drawer 10", "go to shelf 1", "examine vase 1", context_kind="full",
                hidden_state=hidden, **now)  # fmt: skip
    assert told[1:] == ["You open the drawer 10. The drawer 10 is open. In it, you see a watch 1.",
                        "You arrive at shelf 1. On the shelf 1, you see a vase 1.",
                        "This is a cold vase 1."]  # fmt: skip


def test_other_environments_are_refused(
    make_window: MakeWindow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match="--model: 'track' must have windows of alfworld"):
        Track.load([make_window()])
    out = tmp_path / "run"
    asked = ["run", "--suite", "scienceworld-500", "--context", "observed", "--out", str(out), "--model", "track"]
    assert main(asked) == 2
    assert "scienceworld" in capsys.readouterr().err
    assert not out.exists()
    assert main([*asked[:2], "alfworld-500", *asked[3:], "--train-episodes", "x"]) == 2
    assert "--train-episodes: not an option of 'track'" in capsys.readouterr().err
