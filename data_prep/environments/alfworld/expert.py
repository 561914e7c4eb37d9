"""Plan that wins an ALFWorld game, from its facts.

The plan is that of a player who searches: it visits receptacles that could hold the object, in random order, opens
them, and takes the object where it finds it. It uses nothing that a player could not have observed by then, except that
it never gives up.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from data_prep.environments.base import SimulatorError

APPLIANCES = {"ishot": ("heat", "microwave"), "iscool": ("cool", "fridge"), "isclean": ("clean", "sinkbasin")}

_OBJECT = re.compile(r"\(objectType \?(\w+) (\w+)Type\)")
_PLACE = re.compile(r"\(receptacleType \?\w+ (\w+)Type\)")
_STATE = re.compile(r"\((isHot|isCool|isClean) ")


@dataclass(frozen=True)
class Goal:
    """Goal: kinds of things by their names in the game. Either `place` or `lamp` is set."""

    thing: str
    count: int
    place: str | None
    lamp: str | None
    state: str | None


def parse_goal(problem: str) -> Goal:
    """Parse the goal of a PDDL problem. Raises SimulatorError if it is of none of the six tasks."""
    text = problem.partition("(:goal")[2]
    things = {variable: kind.lower() for variable, kind in _OBJECT.findall(text)}
    lamp = things.pop("ot", None)
    place, state = _PLACE.search(text), _STATE.search(text)
    if len(set(things.values())) != 1 or (place is None) == (lamp is None):
        raise SimulatorError("goal: not one of the six tasks")
    return Goal(
        thing=next(iter(things.values())),
        count=len(things),
        place=place[1].lower() if place else None,
        lamp=lamp,
        state=state[1].lower() if state else None,
    )


def kind_of(name: str) -> str:
    """Return the kind in a name: `drawer` for `drawer 4`."""
    return name.split()[0]


def natural(name: str) -> tuple[str, int]:
    """Return a key that sorts `drawer 10` after `drawer 9`."""
    kind, _, number = name.partition(" ")
    return kind, int(number) if number.isdigit() else 0


@dataclass
class Situation:
    """Facts of one moment. `spots` are places to stand; receptacles without one are out of reach and left out."""

    spots: dict[str, str] = field(default_factory=dict)
    contents: dict[str, list[str]] = field(default_factory=dict)
    here: str = ""
    hand: str | None = None
    facts: dict[str, set[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(set))

    @classmethod
    def of(cls, facts: Iterable[Sequence[str]]) -> Situation:
        world = cls()
        for predicate, *names in facts:
            world.facts[predicate].add(tuple(names))
        for receptacle, spot in sorted(world.facts["receptacleatlocation"], key=lambda fact: natural(fact[0])):
            world.spots[receptacle], world.contents[receptacle] = spot, []
        for thing, receptacle in sorted(world.facts["inreceptacle"], key=lambda fact: natural(fact[0])):
            if receptacle in world.contents:
                world.contents[receptacle].append(thing)
        world.here = next((spot for _, spot in world.facts["atlocation"]), "")
        world.hand = next((thing for _, thing in world.facts["holds"]), None)
        return world

    def true(self, predicate: str, *names: str) -> bool:
        return names in self.facts[predicate]

    def closed(self, receptacle: str) -> bool:
        return self.true("openable", receptacle) and not self.true("opened", receptacle)

    def fits(self, thing: str, receptacle: str) -> bool:
        return self.true("cancontain", f"{kind_of(receptacle)}type", f"{kind_of(thing)}type")


def make_plan(facts: Iterable[Sequence[str]], goal: Goal, known_places: Collection[str], seed: str) -> list[str]:
    """Return commands that win from here. known_places: receptacles whose contents were shown already.

    Raises SimulatorError if a thing of the goal is out of reach.
    """
    return _Player(Situation.of(facts), known_places, Random(seed)).play(goal)


class _Player:
    """Applies commands to a copy of the facts and records them."""

    def __init__(self, world: Situation, known_places: Collection[str], rng: Random) -> None:
        self.world, self.seen, self.rng = world, set(known_places), rng
        self.commands: list[str] = []
        self.closes = rng.random() < 0.5
        """True to close receptacles that turned out useless."""

    def play(self, goal: Goal) -> list[str]:
        if goal.lamp is not None:
            self._take(goal.thing, barred="")
            lamp, place = self._find(goal.lamp, barred="")
            self._go(place)
            self.commands.append(f"use {lamp}")
            return self.commands
        targets = [place for place in self.world.contents if kind_of(place) == goal.place]
        if not targets:
            raise SimulatorError(f"not solvable: no {goal.place} within reach")
        target = self.rng.choice(targets)
        while True:
            # an object at the target also needs its state changed first, so it is as good as any other
            self._take(goal.thing, barred=target if goal.state is None else "")
            if goal.state is not None and not self.world.true(goal.state, str(self.world.hand)):
                self._treat(goal.state)
            self._put(target)
            delivered = [thing for thing in self.world.contents[target] if kind_of(thing) == goal.thing]
            if len(delivered) >= goal.count:
                return self.commands

    def _take(self, kind: str, barred: str) -> None:
        """Take a thing of a kind, from anywhere but `barred`."""
        if self.world.hand is not None:
            if kind_of(self.world.hand) == kind:
                return
            homes = [place for place in self.world.contents if self.world.fits(self.world.hand, place)]
            if not homes:
                raise SimulatorError(f"not solvable: nowhere to put the {self.world.hand}")
            self._put(min(homes, key=lambda place: self.world.spots[place] != self.world.here))
        thing, place = self._find(kind, barred)
        self._reach(place)
        self.commands.append(f"take {thing} from {place}")
        self.world.contents[place].remove(thing)
        self.world.hand = thing

    def _find(self, kind: str, barred: str) -> tuple[str, str]:
        """Return a thing of a kind and its place: one seen before, or else one found by a search."""
        places = [place for place in self.world.contents if place != barred]
        unseen = [place for place in places if place not in self.seen]
        self.rng.shuffle(unseen)
        unseen.sort(key=lambda place: not self.world.fits(kind, place))  # stable: random order among equals
        for place in [*(place for place in places if place in self.seen), *unseen]:
            if place not in self.seen:
                self._search(place)
            for thing in self.world.contents[place]:
                if kind_of(thing) == kind:
                    return thing, place
            if place in unseen and self.closes and self.world.true("openable", place):
                self.commands.append(f"close {place}")
                self.world.facts["opened"].discard((place,))
        raise SimulatorError(f"not solvable: no {kind} within reach")

    def _search(self, place: str) -> None:
        """Look into a receptacle."""
        length = len(self.commands)
        self._reach(place)
        if len(self.commands) == length:  # already within reach, from another receptacle
            self.commands.append(f"examine {place}")
        self.seen.add(place)

    def _go(self, place: str) -> None:
        if self.world.here != self.world.spots[place]:
            self.commands.append(f"go to {place}")
            self.world.here = self.world.spots[place]

    def _reach(self, place: str) -> None:
        self._go(place)
        if self.world.closed(place):
            self.commands.append(f"open {place}")
            self.world.facts["opened"].add((place,))

    def _treat(self, state: str) -> None:
        """Make the thing in hand hot, cool or clean."""
        verb, kind = APPLIANCES[state]
        appliance = next((place for place in self.world.contents if kind_of(place) == kind), None)
        if appliance is None:
            raise SimulatorError(f"not solvable: no {kind} within reach")
        self._go(appliance)
        self.commands.append(f"{verb} {self.world.hand} with {appliance}")

    def _put(self, place: str) -> None:
        thing = self.world.hand
        assert thing is not None
        self._reach(place)
        self.seen.add(place)
        self.commands.append(f"move {thing} to {place}")
        self.world.contents[place].append(thing)
        self.world.hand = None
