"""Baseline `track`: an ALFWorld rule program that tracks contents and doors. It learns nothing.

Observations are taken as facts; the effects of deferred actions follow from the game's rules, in its wording. Anything
not observed is guessed: doors are closed, places are empty, and things can be put anywhere.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from eval.models.base import WindowBaseline
from loopwm.records.errors import InputError
from loopwm.records.template import Context
from loopwm.records.windows import Window

NOTHING = "Nothing happens."
START = "You are in the middle of a room. Looking quickly around you, you see nothing."
"""Answer of `look` before the player has gone anywhere, in any room."""

WITH_DOORS = ("cabinet", "drawer", "fridge", "microwave", "safe")
HOLDERS = ("bowl", "box", "cup", "mug", "pan", "plate", "pot")
"""Kinds of objects that could hold others: `examine` lists their contents."""

LAMPS = ("desklamp", "floorlamp")
TREATMENTS = {"heat": ("microwave", "hot"), "cool": ("fridge", "cold"), "clean": ("sinkbasin", "clean")}
"""By verb: the kind of place it needs, and the object's state afterwards."""

TOLD = {
    "close": "You close the {}.",
    "take": "You pick up the {} from the {}.",
    "move": "You move the {} to the {}.",
    "heat": "You heat the {} using the {}.",
    "cool": "You cool the {} using the {}.",
    "clean": "You clean the {} using the {}.",
    "use": "You turn on the {}.",
}
"""Answers that depend on the names in the command only."""

_NAME = re.compile(r"[a-z]+ \d+")
_VIEW = re.compile(
    r"The (?P<closable>[a-z]+ \d+) is (?P<door>open|closed)\.(?: In it, you see (?P<inside>[^.]*)\.)?"
    r"|On the (?P<surface>[a-z]+ \d+), you see (?P<on>[^.]*)\."
)
_FACING = re.compile(r"You are facing the ([^.]*)\.")
_CARRYING = re.compile(r"You are carrying: ([^.]*)\.|You are (not) carrying anything\.")
_STATE = re.compile(r"The ([a-z]+ \d+) is (on|hot|cold|clean)\.")


class Track(WindowBaseline):
    """Predict by simulating a window's actions in the known state of its game."""

    @classmethod
    def load(cls, windows: Sequence[Window], train_episodes: Sequence[Path] = ()) -> Self:
        for env in sorted({window["env"] for window in windows} - {"alfworld"}):
            raise InputError(f"--model: 'track' must have windows of alfworld, whose rules it applies, got {env!r}")
        return cls()

    def answers(self, context: Context, env: str, actions: Sequence[str], horizons: Sequence[int]) -> dict[int, str]:
        game = known_game(context)
        answers = [game.play(action) for action in actions[: max(horizons)]]
        return {k: answers[k - 1] for k in horizons}


def known_game(context: Context) -> Known:
    """Return the state of a game that the context shows; later texts override earlier ones."""
    game = Known()
    for text in (context.hidden_state, context.look, context.inventory, context.observation):
        game.see(text or "")
    for step in context.history:
        if step.observation != NOTHING:
            game.do(split_command(step.action))
        game.see(step.observation)
    return game


@dataclass
class Known:
    """Known state of a game, by names such as `drawer 2`. `contents` lacks places that were not observed."""

    at: str = ""
    hand: str = ""
    """Name of the thing that the player holds, if any."""
    doors: dict[str, str] = field(default_factory=dict)
    """`open`, `closed`, or `none` for a place without a door."""
    contents: dict[str, set[str]] = field(default_factory=dict)
    beside: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Places that the player faces at the same time."""
    states: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def see(self, text: str) -> None:
        """Update from an observation, a look, an inventory or a hidden state."""
        for view in _VIEW.finditer(text):
            place = view["closable"] or view["surface"]
            self.doors[place] = view["door"] or "none"
            listed = view["inside"] if view["closable"] else view["on"]
            if listed is not None:
                self.contents[place] = set(_NAME.findall(listed))
        for facing in _FACING.finditer(text):
            together = set(_NAME.findall(facing[1]))
            self.at = self.at if self.at in together else min(together, default=self.at)  # one spot
            for place in together:
                self.beside[place] |= together
        for carrying in _CARRYING.finditer(text):
            self.hand = "".join(_NAME.findall(carrying[1] or ""))
        for thing, state in _STATE.findall(text):
            self.states[thing].add(state)

    def play(self, action: str) -> str:
        """Return the game's answer and update the state."""
        words = split_command(action)
        if not self._allows(words):
            return NOTHING
        self.do(words)
        return self._tell(words)

    def _allows(self, words: list[str]) -> bool:
        match words:
            case ["look"] | ["inventory"]:
                return True
            case ["go", "to", place]:
                return _is_name(place) and not self._here(place)
            case ["open", place]:
                return self._here(place) and self._door(place) == "closed"
            case ["close", place]:
                return self._here(place) and self._door(place) == "open"
            case ["take", thing, "from", place]:
                return not self.hand and self._reaches(place) and self._may_hold(place, thing)
            case ["move", thing, "to", place]:
                return thing == self.hand and self._reaches(place)
            case ["heat" | "cool" | "clean" as verb, thing, "with", place]:
                return thing == self.hand and self._here(place) and _kind(place) == TREATMENTS[verb][0]
            case ["use", thing]:
                return _kind(thing) in LAMPS and any(self._may_hold(place, thing) for place in self._places_here())
            case ["examine", name]:
                return self._here(name) or name == self.hand or self._in_view(name)
        return False

    def do(self, words: list[str]) -> None:
        """Apply the effects of a valid command."""
        match words:
            case ["go", "to", place]:
                self.at = place
            case ["open", place]:
                self.doors[place] = "open"
            case ["close", place]:
                self.doors[place] = "closed"
            case ["take", thing, "from", place]:
                self.hand = thing
                self.contents.get(place, set()).discard(thing)
            case ["move", thing, "to", place]:
                self.hand = ""
                self.contents.get(place, set()).add(thing)
            case ["heat" | "cool" | "clean" as verb, thing, "with", _]:
                self.states[thing] -= {"heat": {"cold"}, "cool": {"hot"}}.get(verb, set())
                self.states[thing].add(TREATMENTS[verb][1])
            case ["use", thing]:
                self.states[thing].add("on")

    def _tell(self, words: list[str]) -> str:
        """Return the answer to a valid command, after its effects."""
        match words:
            case ["look"]:
                here = _listed(self._places_here())
                return f"You are facing the {here}. Next to it, you see nothing." if here else START
            case ["inventory"]:
                return f"You are carrying: a {self.hand}." if self.hand else "You are not carrying anything."
            case ["go", "to", place]:
                return f"You arrive at {place}. {self._view(place)}"
            case ["open", place]:
                return f"You open the {place}. {self._view(place)}"
            case ["examine", name]:
                return self._view(name) if self._here(name) else self._description(name)
        return TOLD[words[0]].format(*filter(_is_name, words))

    def _places_here(self) -> set[str]:
        return self.beside[self.at] | {self.at} if self.at else set()

    def _here(self, place: str) -> bool:
        return place in self._places_here()

    def _door(self, place: str) -> str:
        return self.doors.get(place, "closed" if _kind(place) in WITH_DOORS else "none")

    def _reaches(self, place: str) -> bool:
        return self._here(place) and self._door(place) != "closed"

    def _may_hold(self, place: str, thing: str) -> bool:
        """Return True if the thing is known to be there, or the place is unknown and the thing nowhere else."""
        if place in self.contents:
            return thing in self.contents[place]
        return not any(thing in things for things in self.contents.values())

    def _in_view(self, thing: str) -> bool:
        """Return True if the thing is known to lie where the player stands."""
        return any(thing in self.contents.get(place, ()) for place in self._places_here() if self._reaches(place))

    def _view(self, place: str) -> str:
        door = self._door(place)
        things = _listed(f"a {thing}" for thing in self.contents.get(place, ())) or "nothing"
        if door == "none":
            return f"On the {place}, you see {things}."
        return f"The {place} is closed." if door == "closed" else f"The {place} is open. In it, you see {things}."

    def _description(self, thing: str) -> str:
        """Return the answer of `examine` for an object: of several states the first that the game checks."""
        if _kind(thing) in HOLDERS:
            return f"This is a normal {thing}. In it, you see nothing."
        if _kind(thing) in LAMPS:
            return f"This {thing} is {'on' if 'on' in self.states[thing] else 'off'}."
        states = [state for state in ("hot", "cold", "clean") if state in self.states[thing]]
        if states == ["cold", "clean"]:
            return f"This is a cool and clean {thing}."
        return f"This is a {' and '.join(states)} {thing}." if states else f"There's nothing special about {thing}."


def split_command(command: str) -> list[str]:
    """Split a command into words, a name (`drawer 2`) being one."""
    return re.findall(r"[a-z]+ \d+|[a-z]+", command)


def _kind(name: str) -> str:
    return name.split()[0]


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def _listed(names: Iterable[str]) -> str:
    """List names in the game's order: kinds ascending, numbers descending."""
    *others, last = sorted(names, key=_place_in_list) or [""]
    return f"{', '.join(others)}, and {last}" if others else last


def _place_in_list(name: str) -> tuple[str, int]:
    kind, _, number = name.rpartition(" ")
    return (kind, -int(number)) if number.isdecimal() else (name, 0)
