"""Probes of ScienceWorld: state shown by its texts, and actions to try in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from lab.data.probes import PLACES, PlaceProbes, absent_name, alfworld_words, pick, scienceworld_words, with_looks
from loopwm.records.episodes import Step

ROOMS = (
    "art studio", "bathroom", "bedroom", "foundry", "greenhouse", "hallway", "kitchen", "living room", "outside",
    "workshop",
)  # fmt: skip

FURNITURE = frozenset(
    ("bathtub", "bed", "bee hive", "blast furnace", "book shelf", "chair", "closet", "couch", "counter", "cupboard",
     "desk", "drain", "fire pit", "fountain", "freezer", "fridge", "ground", "oven", "sink", "stove", "table", "toilet",
     "ultra low temperature freezer", "air", "agent")
)  # fmt: skip
"""Things that are seldom carried."""

EVERYWHERE = ("air", "agent")
"""Things that every place shows."""

_DOOR = re.compile(r"A door to the (.+?) \(that is (open|closed)\)")
_ROOM = re.compile(r"called the (.+?)\.")
_ARTICLE = re.compile(r"^(?:containing )?(?:(?:an?|the|some) |substance called )+", re.IGNORECASE)
_QUALIFIERS = re.compile(r" (?:in the|with an?|approximately|at the|titled|on the) .*")

ALONE = (
    "eat {}", "open {}", "close {}", "read {}", "activate {}", "deactivate {}", "mix {}", "look at {}", "look in {}",
    "pick up {}", "drop {}", "put down {}", "flush {}", "disconnect {}", "use {}", "examine {}", "turn on {}",
    "take {}",
)  # fmt: skip
TOGETHER = (
    "use {0} on {1}", "pour {0} into {1}", "move {0} to {1}", "connect {0} to {1}", "dunk {0} into {1}",
    "put {0} in {1}", "heat {0} with {1}", "clean {0} with {1}", "take {0} from {1}", "cut {0} with {1}",
)  # fmt: skip
COMMON = ("pick up {}", "eat {}", "look at {}", "open {}")
"""Most frequent kinds of try."""

GOES = ("go to {}", "go to {}", "go to {}", "open door to {}", "open door to {}", "close door to {}", "enter {}")


@dataclass(frozen=True)
class Thing:
    """One thing in view.

    lid: open or closed, switch: on or off; each empty if the text names none. holds: True if it could have contents.
    """

    name: str
    lid: str = ""
    switch: str = ""
    holds: bool = False


@dataclass(frozen=True)
class Scene:
    """State shown by a step: things of the room, things held, doors with True if open."""

    room: str
    things: tuple[Thing, ...]
    held: tuple[Thing, ...]
    doors: dict[str, bool]
    view: str

    @classmethod
    def of(cls, step: Step) -> Scene:
        look, inventory = step.look or "", step.inventory or ""
        room = _ROOM.search(look)
        doors = {name: state == "open" for name, state in _DOOR.findall(look)}
        things = tuple(_read(look.partition("You also see:")[0]))
        return cls(room[1] if room else "", things, tuple(_read(inventory)), doors, f"{look}\n{inventory}")

    def names(self) -> list[str]:
        return [thing.name for thing in (*self.things, *self.held)]

    def portable(self) -> list[str]:
        return [thing.name for thing in self.things if thing.name not in FURNITURE]

    def holders(self) -> list[str]:
        """Return things that can hold others."""
        return [t.name for t in (*self.things, *self.held) if t.holds and t.lid != "closed"]


def _read(text: str) -> Iterator[Thing]:
    """Yield the things of an indented listing, contents included."""
    for line in text.splitlines():
        if line.startswith("\t"):
            yield from _read_line(line.strip())


def _read_line(line: str) -> Iterator[Thing]:
    first, *rest = re.split(r"[(),:.]+", line)
    name = _bare(first)
    if not name or name == "nothing":
        return
    lid = re.search(r"door is (open|closed)", line.split(":")[0])
    switch = re.search(r"^[^(:]*?, which is (?:turned )?(on|off|activated|deactivated)", line)
    holds = "containing" in line.partition(")")[0] or "On the" in line or "In the" in line or lid is not None
    state = {"activated": "on", "deactivated": "off"}.get(switch[1], switch[1]) if switch else ""
    yield Thing(name, lid[1] if lid else "", state, holds)
    for part in rest:
        part = part.strip()
        if (part.startswith("containing ") or _ARTICLE.match(part)) and not re.search(r"\b(?:is|you see)\b", part):
            inner = _bare(part)
            if inner and inner != "nothing":
                yield Thing(inner, holds=f"{part} (containing" in line)


def _bare(text: str) -> str:
    """Return the name in a listed piece."""
    return _QUALIFIERS.sub("", _ARTICLE.sub("", text.strip()).removeprefix("containing ")).strip()


class ScienceWorldProbes(PlaceProbes):
    """Draws the probes of one place."""

    def __init__(self, step: Step, rng: Random) -> None:
        self.scene, self.rng = Scene.of(step), rng

    def look(self) -> str:
        """Look about the place, at the things held, or at one thing."""
        thing = self._near()
        return self.rng.choice(
            ("look around", "look around", "inventory", "inventory", f"look at {thing}", f"look in {self._holder()}")
        )

    def _near(self) -> str:
        """Return any name in view; held or not is equally likely."""
        held = [thing.name for thing in self.scene.held]
        if held and self.rng.random() < 0.25:
            return self.rng.choice(held)
        things = [thing.name for thing in self.scene.things if thing.name not in EVERYWHERE or self.rng.random() < 0.2]
        return pick(things or held, self.rng, "agent")

    def _portable(self) -> str:
        return pick(self.scene.portable() or self.scene.names(), self.rng, "agent")

    def _holder(self) -> str:
        return pick(self.scene.holders(), self.rng, "inventory")

    def _room_here(self) -> str:
        return pick(sorted(self.scene.doors), self.rng, "hallway")

    def absent(self) -> list[str]:
        return with_looks([self._absent() for _ in range(self.rng.randint(1, 3))], self.look, self.rng)

    def _absent(self) -> str:
        rng, scene = self.rng, self.scene
        name = absent_name(scienceworld_words(), alfworld_words(), scene.view, scene.names(), rng)
        draw = rng.random()
        if draw < 0.5:
            return rng.choice(COMMON).format(name)
        if draw < 0.72:
            return rng.choice(ALONE).format(name)
        pair = [name, self._near()]
        rng.shuffle(pair)
        return rng.choice(TOGETHER).format(*pair)

    def wrong_use(self) -> list[str]:
        return with_looks([self._wrong_use() for _ in range(self.rng.randint(1, 3))], self.look, self.rng)

    def _wrong_use(self) -> str:
        rng = self.rng
        draw = rng.random()
        if draw < 0.5:
            return rng.choice(ALONE).format(self._near())
        if draw < 0.9:
            return rng.choice(TOGETHER).format(self._near(), self._near())
        closed = [thing.name for thing in self.scene.things if thing.lid == "closed"]
        shut = pick(closed, rng, self._near())
        return rng.choice((f"close {shut}", f"look in {shut}", f"move {self._near()} to {shut}", "open door", "eat"))

    def unreachable(self) -> list[str]:
        actions = [self._unreachable() for _ in range(self.rng.randint(1, 3))]
        return with_looks(actions, lambda: self.rng.choice(("look around", "look around", self.look())), self.rng, 0.4)

    def _unreachable(self) -> str:
        rng, scene = self.rng, self.scene
        far = [room for room in ROOMS if room not in scene.doors and room != scene.room]
        shut = [room for room, is_open in sorted(scene.doors.items()) if not is_open]
        draw = rng.random()
        if draw < 0.3 and shut:
            return f"go to {rng.choice(shut)}"
        if draw < 0.8:
            return rng.choice(GOES).format(pick(far, rng, "moon"))
        if draw < 0.95:
            return rng.choice(GOES).format(rng.choice(PLACES))
        return rng.choice((f"go to {scene.room}", f"go to {self._near()}", "leave", f"go through door to {scene.room}"))

    def repetition(self) -> list[str]:
        rng = self.rng
        action = self._change()
        actions = [action] * rng.randint(2, 4)
        if rng.random() < 0.4:
            actions.insert(rng.randint(1, len(actions)), self.look())
        return actions if rng.random() < 0.4 else [*actions, self.look()]

    def _change(self) -> str:
        """Draw an action that usually works, the first time."""
        rng, scene = self.rng, self.scene
        lids = [t for t in scene.things if t.lid]
        switches = [t for t in (*scene.things, *scene.held) if t.switch]
        options = [f"pick up {self._portable()}", f"pick up {self._portable()}", f"open door to {self._room_here()}"]
        options += [f"go to {self._room_here()}", f"close door to {self._room_here()}", "look around", "inventory"]
        options += [f"{'open' if t.lid == 'closed' else 'close'} {t.name}" for t in lids[:3]]
        options += [f"open {t.name}" for t in lids[:2]]
        options += [f"{'activate' if t.switch == 'off' else 'deactivate'} {t.name}" for t in switches[:4]]
        options += [f"drop {t.name}" for t in scene.held] * 2
        options += [f"move {self._portable()} to {self._holder()}", f"look at {self._near()}", f"eat {self._near()}"]
        return rng.choice(options)

    def permanence(self) -> list[str]:
        """Change the state and look at it, in any of several orders."""
        rng, scene = self.rng, self.scene
        stories = [self._carried, self._carried, self._put_into, self._carried_away, self._door]
        if scene.held:
            stories += [self._put_down, self._put_down]
        if any(thing.lid for thing in scene.things):
            stories += [self._lid]
        if any(thing.switch for thing in (*scene.things, *scene.held)):
            stories += [self._switch]
        if len(scene.holders()) > 1:
            stories += [self._poured]
        return rng.choice(stories)()

    def _looks(self, *more: str) -> list[str]:
        """Return one or two looks, from those at the changed things and others."""
        return self.rng.sample(("look around", "inventory", *more), self.rng.randint(1, 2))

    def _carried(self) -> list[str]:
        thing, leave = self._portable(), self.rng.choice(("drop", "put down"))
        return [f"pick up {thing}", *self._looks(), f"{leave} {thing}", *self._looks()]

    def _put_down(self) -> list[str]:
        thing = self.rng.choice(self.scene.held).name
        away = self.rng.choice((f"drop {thing}", f"put down {thing}", f"move {thing} to {self._holder()}"))
        return [away, *self._looks(f"look at {thing}"), f"pick up {thing}", *self._looks()]

    def _put_into(self) -> list[str]:
        thing, place = self._near(), self._holder()
        looks = (f"look in {place}", f"look at {place}")
        return [f"move {thing} to {place}", *self._looks(*looks), f"pick up {thing}", *self._looks(*looks)]

    def _carried_away(self) -> list[str]:
        thing, room, here = self._portable(), self._room_here(), self.scene.room
        way = [] if self.scene.doors.get(room) else [f"open door to {room}"]
        left = [f"drop {thing}"] if self.rng.random() < 0.5 else self._looks()
        return [f"pick up {thing}", *way, f"go to {room}", *left, f"go to {here}", "look around"]

    def _door(self) -> list[str]:
        room = self._room_here()
        first, then = ("close", "open") if self.scene.doors.get(room) else ("open", "close")
        return [f"{first} door to {room}", "look around", f"{then} door to {room}", f"go to {room}", "look around"]

    def _lid(self) -> list[str]:
        thing = self.rng.choice([thing for thing in self.scene.things if thing.lid])
        first, then = ("open", "close") if thing.lid == "closed" else ("close", "open")
        looks = (f"look in {thing.name}", f"look at {thing.name}")
        return [f"{first} {thing.name}", *self._looks(*looks), f"{then} {thing.name}", *self._looks(*looks)]

    def _switch(self) -> list[str]:
        thing = self.rng.choice([thing for thing in (*self.scene.things, *self.scene.held) if thing.switch])
        first, then = ("activate", "deactivate") if thing.switch == "off" else ("deactivate", "activate")
        look = f"look at {thing.name}"
        return [f"{first} {thing.name}", *self._looks(look), f"{then} {thing.name}", *self._looks(look)]

    def _poured(self) -> list[str]:
        source, target = self.rng.sample(self.scene.holders(), 2)
        looks = (f"look in {source}", f"look in {target}")
        return [f"pour {source} into {target}", *self._looks(*looks), f"pick up {source}", *self._looks(*looks)]


def draw_probe(kind: str, step: Step, rng: Random) -> list[str]:
    """Draw the actions of a probe of a kind, at the place that a step shows."""
    return ScienceWorldProbes(step, rng).draw(kind)
