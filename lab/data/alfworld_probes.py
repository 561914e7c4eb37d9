"""Probes of ALFWorld: state shown by its texts, and actions to try in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from lab.data.probes import PLACES, PlaceProbes, absent_name, alfworld_words, pick, scienceworld_words, with_looks
from loopwm.records.episodes import Step

PLACE_KINDS = (
    "armchair", "bathtubbasin", "bed", "cabinet", "cart", "coffeemachine", "coffeetable", "countertop", "desk",
    "diningtable", "drawer", "dresser", "fridge", "garbagecan", "handtowelholder", "microwave", "ottoman", "safe",
    "shelf", "sidetable", "sinkbasin", "sofa", "stoveburner", "toaster", "toilet", "toiletpaperhanger", "towelholder",
)  # fmt: skip

_NAME = re.compile(r"\b[a-z]+ \d+")
_VIEW = re.compile(r"(?:On the|The) (\w+ \d+)(?: is (open|closed)\.)?")

ALONE = (
    "examine {}", "open {}", "close {}", "use {}", "take {}", "pick up {}", "eat {}", "look at {}", "turn on {}",
    "go to {}", "put down {}", "read {}", "drop {}",
)  # fmt: skip
TOGETHER = (
    "take {0} from {1}", "move {0} to {1}", "heat {0} with {1}", "clean {0} with {1}", "cool {0} with {1}",
    "slice {0} with {1}", "put {0} in/on {1}", "put {0} in {1}",
)  # fmt: skip
WORKING = 0.25
"""Share of tries that are valid."""

APPLIANCES = {"heat": "microwave", "clean": "sinkbasin", "cool": "fridge"}


@dataclass(frozen=True)
class Scene:
    """State shown by a step.

    lids: places faced, with open, closed or empty if there is no lid. contents: by place. held: empty for nothing.
    view: all of it as text.
    """

    lids: dict[str, str]
    contents: dict[str, tuple[str, ...]]
    held: str
    view: str

    @classmethod
    def of(cls, step: Step) -> Scene:
        first, *views = (step.look or "").splitlines() or [""]
        lids, contents = {}, {}
        for view in views:
            if match := _VIEW.match(view):
                lids[match[1]] = match[2] or ""
                contents[match[1]] = tuple(_NAME.findall(view[match.end() :]))
        held = _NAME.search(step.inventory or "")
        return cls(lids, contents, held[0] if held else "", "\n".join((first, *views, step.inventory or "")))

    def things(self) -> list[tuple[str, str]]:
        """Return (thing, place) of all contents shown."""
        return [(thing, place) for place, things in self.contents.items() for thing in things]

    def names(self) -> list[str]:
        return [*self.lids, *(thing for thing, _ in self.things()), *filter(None, [self.held])]


class AlfWorldProbes(PlaceProbes):
    """Draws the probes of one place. places: all of the room."""

    def __init__(self, step: Step, places: Sequence[str], rng: Random) -> None:
        self.scene, self.rng = Scene.of(step), rng
        self.elsewhere = [place for place in places if place not in self.scene.lids] or ["shelf 1"]

    def look(self) -> str:
        return self.rng.choice(("look", "inventory", "inventory", f"examine {self._here()}", f"examine {self._near()}"))

    def _here(self) -> str:
        return pick(list(self.scene.lids), self.rng, self.elsewhere[0])

    def _near(self) -> str:
        return pick(self.scene.names(), self.rng, self._away())

    def _away(self) -> str:
        return self.rng.choice(self.elsewhere)

    def _thing(self) -> str:
        """Return the thing in hand or one that lies here, equally likely."""
        things = [thing for thing, _ in self.scene.things()]
        if self.scene.held and (not things or self.rng.random() < 0.5):
            return self.scene.held
        return pick(things, self.rng, self._near())

    def _tries(self, draw: Callable[[], str]) -> list[str]:
        """Return some draws with looks in between, and at times a valid action: else all answers would be refusals."""
        actions = [self._change() if self.rng.random() < WORKING else draw() for _ in range(self.rng.randint(1, 3))]
        return with_looks(actions, self.look, self.rng)

    def absent(self) -> list[str]:
        return self._tries(self._absent)

    def _absent(self) -> str:
        rng, scene = self.rng, self.scene
        name = absent_name(alfworld_words(), scienceworld_words(), scene.view, scene.names(), rng)
        if not name[-1].isdigit() and rng.random() < 0.7:
            name = f"{name} {rng.randint(1, 4)}"
        draw = rng.random()
        if draw < 0.4:
            return f"take {name} from {self._here()}"
        if draw < 0.7:
            return rng.choice(ALONE).format(name)
        pair = [name, self._near()]
        if draw > 0.9:
            pair.reverse()
        return rng.choice(TOGETHER).format(*pair)

    def wrong_use(self) -> list[str]:
        return self._tries(self._wrong_use)

    def _wrong_use(self) -> str:
        rng, scene = self.rng, self.scene
        draw = rng.random()
        if draw < 0.35:
            return rng.choice(ALONE).format(self._thing())
        if draw < 0.6:
            verb, appliance = rng.choice(sorted(APPLIANCES.items()))
            return f"{verb} {self._thing()} with {rng.choice((self._here(), self._here(), f'{appliance} 1'))}"
        if draw < 0.85:
            return rng.choice(TOGETHER).format(self._thing(), rng.choice((self._here(), self._near())))
        shut = [place for place, lid in scene.lids.items() if lid == "closed"]
        return f"close {rng.choice(shut)}" if shut else f"{rng.choice(('open', 'close', 'use'))} {self._here()}"

    def unreachable(self) -> list[str]:
        return self._tries(self._unreachable)

    def _unreachable(self) -> str:
        rng = self.rng
        draw = rng.random()
        if draw < 0.3:
            return rng.choice(("open {}", "close {}", "examine {}")).format(self._away())
        if draw < 0.55:
            thing = rng.choice((self._thing(), f"{rng.choice(alfworld_words())} {rng.randint(1, 3)}"))
            return rng.choice(("take {} from {}", "take {} from {}", "move {} to {}")).format(thing, self._away())
        if draw < 0.75:
            kind = rng.choice((*PLACE_KINDS, self._away().split()[0]))
            return f"go to {kind} {rng.choice((1, 2, 7, 12, 25, 40))}"
        return f"go to {rng.choice((self._here(), self._here(), rng.choice(PLACES), rng.choice(PLACE_KINDS)))}"

    def repetition(self) -> list[str]:
        rng = self.rng
        actions = [self._change()] * rng.randint(2, 4)
        if rng.random() < 0.4:
            actions.insert(rng.randint(1, len(actions)), self.look())
        return actions if rng.random() < 0.4 else [*actions, self.look()]

    def _change(self) -> str:
        """Draw an action that usually works, the first time."""
        scene = self.scene
        options = [self.rng.choice(("look", "inventory")), f"go to {self._away()}", f"examine {self._near()}"]
        options += [f"take {thing} from {place}" for thing, place in scene.things()[:4] if not scene.held]
        options += [f"move {scene.held} to {place}" for place in scene.lids if scene.held] * 2
        options += [f"{'open' if lid == 'closed' else 'close'} {place}" for place, lid in scene.lids.items() if lid] * 2
        options += [f"use {thing}" for thing, _ in scene.things() if "lamp" in thing]
        return self.rng.choice(options)

    def permanence(self) -> list[str]:
        """Change the state and look at it, in any of several orders."""
        scene = self.scene
        stories = []
        if scene.things() and not scene.held:
            stories += [self._taken, self._taken, self._carried_away]
        if scene.held and scene.lids:
            stories += [self._put, self._put, self._put_elsewhere]
        if any(scene.lids.values()):
            stories += [self._lid, self._left_open]
        return self.rng.choice(stories)() if stories else self._gone()

    def _looks(self, *more: str) -> list[str]:
        """Return one or two looks, from those at the changed things and others."""
        return self.rng.sample((*more, "inventory", self.rng.choice(("look", more[0]))), self.rng.randint(1, 2))

    def _taken(self) -> list[str]:
        thing, place = self.rng.choice(self.scene.things())
        look = f"examine {place}"
        return [f"take {thing} from {place}", *self._looks(look), f"move {thing} to {place}", *self._looks(look)]

    def _carried_away(self) -> list[str]:
        thing, place = self.rng.choice(self.scene.things())
        there = self._away()
        left = self.rng.choice((f"move {thing} to {there}", "inventory"))
        return [f"take {thing} from {place}", f"go to {there}", left, f"go to {place}", f"examine {place}"]

    def _put(self) -> list[str]:
        thing, place = self.scene.held, self._here()
        way = [f"open {place}"] if self.scene.lids[place] == "closed" else []
        look, again = f"examine {place}", f"take {thing} from {place}"
        return [*way, f"move {thing} to {place}", *self._looks(look), again, *self._looks(look)]

    def _put_elsewhere(self) -> list[str]:
        thing, place = self.scene.held, self._here()
        return [f"move {thing} to {place}", f"go to {self._away()}", "inventory", f"go to {place}", f"examine {place}"]

    def _lid(self) -> list[str]:
        place = self.rng.choice([place for place, lid in self.scene.lids.items() if lid])
        first, then = ("open", "close") if self.scene.lids[place] == "closed" else ("close", "open")
        look = f"examine {place}"
        return [f"{first} {place}", *self._looks(look), f"{then} {place}", *self._looks(look)]

    def _left_open(self) -> list[str]:
        place = self.rng.choice([place for place, lid in self.scene.lids.items() if lid])
        verb = "open" if self.scene.lids[place] == "closed" else "close"
        return [f"{verb} {place}", f"go to {self._away()}", "look", f"go to {place}", f"examine {place}"]

    def _gone(self) -> list[str]:
        """Go to a place and look about, because there is nothing to change here."""
        place = self._away()
        return [f"go to {place}", *self._looks(f"examine {place}")]


def draw_probe(kind: str, step: Step, places: Sequence[str], rng: Random) -> list[str]:
    """Draw the actions of a probe of a kind, at the place that a step shows, in a room of these places."""
    return AlfWorldProbes(step, places, rng).draw(kind)
