"""An agent of ALFWorld that reads goal and observations only and searches place after place.

It knows the game's commands. Where it looks next is its only freedom: an `Order` of the places.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from loopwm.records.errors import InputError
from loopwm.records.template import Context

Order = Callable[[Context, str, Sequence[str]], list[str]]
"""(context, kind of the thing to find, places not seen yet, as listed) -> the places, the first to look into first."""

APPLIANCES = {"clean": "sinkbasin", "cool": "fridge", "heat": "microwave"}
_LAMP = re.compile(r"(?:examine|look at) (?:the )?(\w+) (?:with|under) the (\w+)\.")
_PUT = re.compile(
    r"(?:find two (?P<two>\w+) and put them|put two (?P<both>\w+)"
    r"|(?P<verb>clean|cool|heat) some (?P<changed>\w+) and put it|put an? (?P<state>clean|cool|hot) (?P<in_state>\w+)"
    r"|put (?:an?|some) (?P<plain>\w+)) (?:in|on) (?P<place>\w+)\."
)
NAME = re.compile(r"[a-z]+ \d+")
TAKEN = re.compile(r"You pick up the (\w+ \d+) from the (\w+ \d+)")
MOVED = re.compile(r"You move the (\w+ \d+) to the (\w+ \d+)")
CHANGED = re.compile(r"You (heat|cool|clean) the (\w+ \d+) using")
SHOWN = re.compile(r"(?:On the|The) (\w+ \d+)(?: is open\. In it)?, you see (.*?)\.")


def kind_of(name: str) -> str:
    return name.split()[0]


@dataclass(frozen=True)
class Goal:
    """Goal of a game: bring `count` things of a kind to a place of a kind.

    verb: done to the thing first. lamp: used while the thing is held; there is no place then.
    """

    thing: str
    place: str | None = None
    count: int = 1
    verb: str | None = None
    lamp: str | None = None


def parse_goal(text: str) -> Goal:
    """Return the goal of a game. Raises InputError for other sentences."""
    if lamp := _LAMP.search(text):
        return Goal(lamp[1], lamp=lamp[2])
    if not (put := _PUT.search(text)):
        raise InputError(f"goal: must be one of ALFWorld's, got {text!r}")
    names = ("two", "both", "changed", "in_state", "plain")
    thing = next(put[name] for name in names if put[name])
    verb = put["verb"] or {"hot": "heat"}.get(put["state"], put["state"])
    return Goal(thing, put["place"], 2 if put["two"] or put["both"] else 1, verb)


@dataclass
class Known:
    """State of the rooms by the observations of a context. contents: of places that were looked into."""

    places: list[str]
    contents: dict[str, list[str]] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    here: str | None = None
    held: str | None = None
    changed: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, context: Context) -> Known:
        listing = context.observation.partition("you see")[2].partition("Your task")[0]
        known = cls(NAME.findall(listing))
        for step in context.history:
            known._read(step.action, step.observation)
        return known

    def _read(self, action: str, text: str) -> None:
        if action.startswith("go to ") and (text.startswith(("You arrive", "Nothing happens"))):
            self.here = action.removeprefix("go to ")  # refused where the place is within reach already
        self.closed.update(re.findall(r"The (\w+ \d+) is closed", text))
        self.closed.difference_update(re.findall(r"You open the (\w+ \d+)", text))
        self.contents |= {place: NAME.findall(things) for place, things in SHOWN.findall(text)}
        if taken := TAKEN.match(text):
            self.held = taken[1]
            self.contents[taken[2]] = [name for name in self.contents.get(taken[2], []) if name != taken[1]]
        if moved := MOVED.match(text):
            self.held = None
            self.contents.setdefault(moved[2], []).append(moved[1])
        if changed := CHANGED.match(text):
            self.changed.add(changed[2])

    def find(self, kind: str, barred: str | None = None) -> tuple[str, str] | None:
        """Return a thing of a kind and its place, which is of another kind than `barred`; None if none was seen."""
        things_here = (
            (thing, place)
            for place, things in self.contents.items()
            for thing in things
            if kind_of(thing) == kind and kind_of(place) != barred
        )
        return next(things_here, None)

    def first(self, kind: str) -> str | None:
        return next((place for place in self.places if kind_of(place) == kind), None)


class Searcher:
    """Agent of one play: an order is settled once for each kind of thing that is looked for."""

    identity: Mapping[str, str | int] = {}

    def __init__(self, order: Order) -> None:
        self._order = order
        self._orders: dict[str, list[str]] = {}

    def act(self, context: Context) -> str | None:
        goal, known = parse_goal(context.goal), Known.of(context)
        if known.held is None:
            barred = goal.place if goal.verb is None else None
            thing = known.find(goal.thing, barred)
            if thing is None:
                return self._search(context, known, goal.thing, barred)
            return self._at(known, thing[1], f"take {thing[0]} from {thing[1]}")
        if goal.verb is not None and known.held not in known.changed:
            appliance = known.first(APPLIANCES[goal.verb])
            return appliance and self._at(known, appliance, f"{goal.verb} {known.held} with {appliance}")
        if goal.lamp is not None:
            lamp = known.find(goal.lamp)
            if lamp is None:
                return self._search(context, known, goal.lamp, None)
            return self._at(known, lamp[1], f"use {lamp[0]}")
        return self._bring(known, goal, known.held)

    def _bring(self, known: Known, goal: Goal, thing: str) -> str | None:
        """Put the thing down, where another one lies if two are asked for."""
        with_one = (p for p, names in known.contents.items() if any(kind_of(name) == goal.thing for name in names))
        places = [place for place in with_one if kind_of(place) == goal.place] if goal.count > 1 else []
        place = next(iter(places), None) or known.first(goal.place or "")
        if place is None:
            return None
        if place in known.closed and place == known.here:
            return f"open {place}"
        return self._at(known, place, f"move {thing} to {place}")

    def _at(self, known: Known, place: str, action: str) -> str:
        return action if known.here == place else f"go to {place}"

    def _search(self, context: Context, known: Known, kind: str, last: str | None) -> str | None:
        """Look into the next place; those of the kind `last` come last."""
        if known.here in known.closed:
            return f"open {known.here}"
        if kind not in self._orders:
            order = self._order(context, kind, [place for place in known.places if place not in known.contents])
            self._orders[kind] = sorted(order, key=lambda place: kind_of(place) == last)
        place = next((place for place in self._orders[kind] if place not in known.contents), None)
        if place is None:
            return None
        return f"examine {place}" if place == known.here else f"go to {place}"
