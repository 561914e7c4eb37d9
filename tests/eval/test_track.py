"""The rules of ALFWorld, played by `track`."""

from __future__ import annotations

import pytest

from eval.errors import EvalError
from eval.track import NOTHING, Track, load_track
from eval.windows import Window
from loopwm.text.format import Regime
from tests.eval.conftest import MakeWindow

ROOM = (
    "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see a "
    "desk 1, a drawer 2, a drawer 1, a fridge 1, a microwave 1, a sinkbasin 1, and a shelf 1."
)
AT_DESK = ("go to desk 1", "You arrive at desk 1. On the desk 1, you see a cd 1, a desklamp 1, and a mug 2.")
AT_DRAWER = ("go to drawer 2", "You arrive at drawer 2. The drawer 2 is closed.")
FACING = ("look", "You are facing the drawer 2, and drawer 1. Next to it, you see nothing.")


@pytest.fixture
def answers(make_window: MakeWindow):  # type: ignore[no-untyped-def]
    def play(*actions: str, history: tuple[tuple[str, str], ...] = (), regime: Regime = "observed", **fields: object) -> list[str]:
        window: Window = make_window(history=[(None, ROOM), *history], actions=list(actions), env="alfworld", **fields)
        return list(Track().predict([window], regime, range(1, len(actions) + 1))[0].texts.values())

    return play
