"""Actions that bring a ScienceWorld back to the place where a gold path was left.

Rooms, places, lids, switches and connections are compared with the earlier ones; things eaten, mixed or burnt are lost.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

INVENTORY = "inventory"

_PLACE = re.compile(r"^This (?:room|outside location) is called the (.+?)\. ", re.MULTILINE)
_DOOR = re.compile(r"^\tA door to the (.+) \(that is (open|closed)\)$", re.MULTILINE)

Doors = Mapping[str, Mapping[str, bool]]
"""By room and the room a door leads to: True if the door is open."""


@dataclass(frozen=True)
class Thing:
    """Thing that can be moved, shut ("open", "closed") or switched ("on", "off"); empty if it cannot."""

    name: str
    container: str
    lid: str
    switch: str
    connections: str


@dataclass(frozen=True)
class Arrangement:
    """Places of the agent and the things. things: by the simulator's ids."""

    room: str
    things: Mapping[str, Thing]
    doors: Doors


def parse_doors(rooms: str) -> Doors:
    """Return the doors in the looks of rooms."""
    doors: dict[str, dict[str, bool]] = {}
    _, *parts = _PLACE.split(rooms)
    for room, look in zip(parts[::2], parts[1::2], strict=True):
        doors[room] = {target: state == "open" for target, state in _DOOR.findall(look)}
    return doors


def repair(before: Arrangement, now: Arrangement) -> list[str]:
    """Return actions that restore the earlier arrangement, as far as names identify things."""
    way = _shortest_way(now.doors, now.room, before.room)
    actions = []
    for room, target in pairwise(way):
        actions += [f"go to {target}"] if now.doors[room][target] else [f"open door to {target}", f"go to {target}"]
    for key, was in before.things.items():
        current = now.things.get(key)
        if current is not None and current != was:
            actions += _put_right(was, current, before.room)
    for target, was_open in before.doors.get(before.room, {}).items():
        is_open = target in way or now.doors[before.room][target]
        if is_open != was_open:
            actions.append(f"{'open' if was_open else 'close'} door to {target}")
    return actions


def _shortest_way(doors: Doors, start: str, goal: str) -> list[str]:
    """Return rooms from start to goal, both included; only the goal if there is no way."""
    came_from = {start: start}
    queue = deque([start])
    while queue and goal not in came_from:
        room = queue.popleft()
        for target in doors.get(room, ()):
            if target not in came_from:
                came_from[target] = room
                queue.append(target)
    way = [goal]
    while way[-1] != came_from.get(way[-1], way[-1]):
        way.append(came_from[way[-1]])
    return way[::-1]


def _put_right(was: Thing, now: Thing, room: str) -> Iterator[str]:
    if was.connections < now.connections:
        yield f"disconnect {was.name}"
    if was.container != now.container:
        if was.container == INVENTORY:
            yield f"pick up {was.name}"
        elif was.container == room:
            if now.container != INVENTORY:
                yield f"pick up {was.name}"
            yield f"drop {was.name}"
        else:
            yield f"move {was.name} to {was.container}"
    if was.lid != now.lid:
        yield f"{'open' if was.lid == 'open' else 'close'} {was.name}"
    if was.switch != now.switch:
        yield f"{'activate' if was.switch == 'on' else 'deactivate'} {was.name}"
