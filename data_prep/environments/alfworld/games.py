"""Build ALFWorld games from the `alfworld` package's data: floor plans, PDDL domain, grammar and affordances.

A game follows from its name, "built/TASK-PLAN-SEED". Receptacles and the places to stand come from the floor plan; the
objects, their number and places are drawn by the seed, and so is the goal, among those that the things in the room
allow. The goal's objects never start in the goal's receptacles, so no game begins won.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from runpy import run_path
from typing import Any

from loopwm.records.errors import InputError

TASKS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)

EXCLUDED_PLANS = frozenset((9, 10, 29, 215, 219, 226, 308, 315, 325, 404, 424, 425))
"""Floor plans of ALFWorld's unseen games."""

SEEDS = 99
"""Training games listed for each task and floor plan; any seed can be built."""

DEV_GAMES = 12
"""Dev games of a task, on as many floor plans, with the first seed that is not listed."""

APPLIANCES = {  # appliance for the goal's state, and the object's ability it requires
    "pick_clean_then_place_in_recep": ("SinkBasin", "Cleanable"),
    "pick_heat_then_place_in_recep": ("Microwave", "Heatable"),
    "pick_cool_then_place_in_recep": ("Fridge", "Coolable"),
}
LAMP = "DeskLamp"
LAMP_PLACES = ("Desk", "SideTable", "Dresser", "Shelf", "CoffeeTable")
UNPLACED = {"StoveBurner": 4, "GarbageCan": 1, "CoffeeMachine": 1, "Toaster": 1, "TowelHolder": 1, "HandTowelHolder": 1}
"""Receptacles without a position in floor plans, and their number in a room."""

COPIES = (1, 1, 2, 2, 3)
"""Copies of each kind of object, to draw from; a task for two needs at least two."""

_NAME = re.compile(r"built/(\w+)-(\d+)-(\d+)")

ABILITIES = {"Cleanable": "cleanable", "Heatable": "heatable", "Coolable": "coolable", "Sliceable": "sliceable"}


@dataclass(frozen=True)
class Package:
    """Data of the installed `alfworld` package."""

    layouts: Path
    domain: str
    grammar: str
    goals: Mapping[str, Mapping[str, Any]]
    holds: Mapping[str, Collection[str]]
    abilities: Mapping[str, Collection[str]]
    openable: Collection[str]
    vessels: Collection[str]


@cache
def load_package() -> Package:
    """Load the package's data. Raises InputError if it is not installed."""
    if (spec := find_spec("alfworld")) is None or not spec.submodule_search_locations:
        raise InputError("alfworld: the package alfworld is not installed; pip install 'loopwm[alfworld]'")
    home = Path(spec.submodule_search_locations[0])
    # run as files: importing the package creates the folder in ALFWORLD_DATA
    constants = run_path(str(home / "gen" / "constants.py"))
    return Package(
        layouts=home / "gen" / "layouts",
        domain=(home / "data" / "alfred.pddl").read_text(encoding="utf-8"),
        grammar=(home / "data" / "alfred.twl2").read_text(encoding="utf-8"),
        goals=run_path(str(home / "gen" / "goal_library.py"))["gdict"],
        holds=constants["VAL_RECEPTACLE_OBJECTS"],
        abilities=constants["VAL_ACTION_OBJECTS"],
        openable=constants["OPENABLE_CLASS_SET"],
        vessels=constants["MOVABLE_RECEPTACLES_SET"],
    )


@dataclass(frozen=True)
class Room:
    """Floor plan: receptacles (id to kind and place to stand) and the kinds of object it may hold."""

    kinds: Mapping[str, str]
    places: Mapping[str, str]
    objects: tuple[str, ...]


@cache
def load_room(plan: int) -> Room:
    """Load a room. Raises InputError for a floor plan that does not exist or is excluded."""
    package = load_package()
    path = package.layouts / f"FloorPlan{plan}-openable.json"
    if plan in EXCLUDED_PLANS or not path.is_file():
        raise InputError(f"alfworld: floor plan {plan}: {'excluded' if plan in EXCLUDED_PLANS else 'no such plan'}")
    named = set(json.loads(path.with_name(f"FloorPlan{plan}-objects.json").read_bytes()))
    kinds: dict[str, str] = {}
    places: dict[str, str] = {}
    for key, pose in sorted(json.loads(path.read_bytes()).items()):
        parts = key.split("|")
        kind = parts[-1] if parts[-1].endswith("Basin") else parts[0]
        if kind in package.holds:
            kinds[_pddl_name(key)] = kind
            places[_pddl_name(key)] = _pddl_name("loc|" + "|".join(f"{number:g}" for number in pose))
    for kind in sorted(named & UNPLACED.keys() - set(kinds.values())):
        for i in range(UNPLACED[kind]):
            kinds[_pddl_name(f"{kind}|{i}")] = kind
            places[_pddl_name(f"{kind}|{i}")] = _pddl_name(f"loc|{kind}|{i}")
    present = set(kinds.values())
    holdable = {thing for kind in present for thing in package.holds[kind]}
    return Room(kinds, places, tuple(sorted(named & holdable - present)))


def _pddl_name(name: str) -> str:
    """Return the form from which the package derives the names shown to players."""
    for character, word in (("|", "_bar_"), ("+", "_plus_"), ("-", "_minus_"), (".", "_dot_")):
        name = name.replace(character, word)
    return name


def goals_of(task: str, plan: int) -> list[tuple[str, str]]:
    """Return the kind of object, and of receptacle (or lamp), of all goals of a task that a floor plan allows."""
    package, room = load_package(), load_room(plan)
    present = sorted(set(room.kinds.values()))
    if task == "look_at_obj_in_light":
        named = json.loads((package.layouts / f"FloorPlan{plan}-objects.json").read_bytes())
        lit = LAMP in named and not set(LAMP_PLACES).isdisjoint(present)
        return [(thing, LAMP) for thing in room.objects] if lit else []
    appliance, ability = APPLIANCES.get(task, (None, None))
    if appliance and appliance not in present:
        return []
    return [
        (thing, goal)
        for thing in room.objects
        for goal in present
        if thing in package.holds[goal]
        and goal != appliance
        and (ability is None or thing in package.abilities[ability])
        and any(thing in package.holds[kind] for kind in present if kind != goal)
    ]


@cache
def list_games(task: str) -> tuple[str, ...]:
    """Return names of a task's training games on all floor plans that allow it."""
    return tuple(f"built/{task}-{plan}-{seed}" for plan in _plans_of(task) for seed in range(SEEDS))


def list_dev_games(task: str) -> tuple[str, ...]:
    plans = _plans_of(task)
    spread = plans[:: max(1, len(plans) // DEV_GAMES)][:DEV_GAMES]
    return tuple(f"built/{task}-{plan}-{SEEDS}" for plan in spread)


def _plans_of(task: str) -> list[int]:
    files = load_package().layouts.glob("FloorPlan*-openable.json")
    plans = (int(path.name[len("FloorPlan") : -len("-openable.json")]) for path in files)
    return [plan for plan in sorted(plans) if plan not in EXCLUDED_PLANS and goals_of(task, plan)]


def build_game(name: str) -> dict[str, Any]:
    """Return the fields of a `game.tw-pddl`. Raises InputError for an invalid name."""
    if (parts := _NAME.fullmatch(name)) is None or parts[1] not in TASKS:
        raise InputError(f"alfworld: must be built/TASK-PLAN-SEED, got {name!r}")
    task, plan = parts[1], int(parts[2])
    goals = goals_of(task, plan)
    if not goals:
        raise InputError(f"alfworld: {name!r}: floor plan {plan} has no such task")
    package, rng = load_package(), Random(name)
    thing_kind, goal_kind = rng.choice(goals)
    things = _place_objects(task, plan, thing_kind, goal_kind, rng)
    gaps = {"obj": thing_kind, "recep": goal_kind, "toggle": goal_kind}
    goal = package.goals[task]
    sentence = rng.choice(goal["templates"]).format(**{gap: kind.lower() for gap, kind in gaps.items()})
    problem = _problem(load_room(plan), things, goal["pddl"].replace("#", "-").format(**gaps))
    grammar = package.grammar.replace("UNKNOWN GOAL", sentence)
    return {"pddl_domain": package.domain, "grammar": grammar, "pddl_problem": problem, "solvable": True}


def _place_objects(task: str, plan: int, goal_thing: str, goal_place: str, rng: Random) -> dict[str, tuple[str, str]]:
    """Return objects by id: their kind and the receptacle they lie in."""
    package, room = load_package(), load_room(plan)
    things = {}
    for kind in room.objects:
        barred = goal_place if kind == goal_thing else None
        homes = sorted({place for place in room.kinds.values() if kind in package.holds[place]} - {barred})
        copies = rng.choice(COPIES)
        if kind == goal_thing and task == "pick_two_obj_and_place":
            copies = max(copies, 2)
        for i in range(copies if homes else 0):
            things[f"{kind}_bar_{i}"] = (kind, _draw_receptacle(room, rng.choice(homes), rng))
    if goal_place == LAMP:
        homes = [place for place in LAMP_PLACES if place in room.kinds.values()]
        things[f"{LAMP}_bar_0"] = (LAMP, _draw_receptacle(room, rng.choice(homes), rng))
    return things


def _draw_receptacle(room: Room, kind: str, rng: Random) -> str:
    return rng.choice([receptacle for receptacle, its_kind in room.kinds.items() if its_kind == kind])


def _problem(room: Room, things: Mapping[str, tuple[str, str]], goal: str) -> str:
    """Return the PDDL problem. goal: the package's text, which closes the problem too, or nearly."""
    package = load_package()
    start = "loc_bar_start"
    objects = {"agent1": "agent", start: "location"}
    objects |= dict.fromkeys(room.kinds, "receptacle") | dict.fromkeys(room.places.values(), "location")
    objects |= dict.fromkeys(things, "object")
    objects |= {f"{kind}Type": "rtype" for kind in room.kinds.values()}
    objects |= {f"{kind}Type": "otype" for kind, _ in things.values()}
    facts = [f"atLocation agent1 {start}"]
    for receptacle, kind in room.kinds.items():
        facts += [
            f"receptacleType {receptacle} {kind}Type",
            f"receptacleAtLocation {receptacle} {room.places[receptacle]}",
        ]
        facts += [f"openable {receptacle}"] if kind in package.openable else []
    for thing, (kind, receptacle) in things.items():
        facts += [f"objectType {thing} {kind}Type", f"inReceptacle {thing} {receptacle}"]
        facts += [f"objectAtLocation {thing} {room.places[receptacle]}"]
        able = [fact for ability, fact in ABILITIES.items() if kind in package.abilities[ability]]
        able += ["isReceptacleObject"] if kind in package.vessels else []
        facts += [f"{fact} {thing}" for fact in (["toggleable"] if kind == LAMP else ["pickupable", *able])]
    kinds = sorted({kind for kind, _ in things.values()})
    for place in sorted(set(room.kinds.values())):
        facts += [f"canContain {place}Type {kind}Type" for kind in kinds if kind in package.holds[place]]
    listing = "\n".join(f"{name} - {kind}" for name, kind in objects.items())
    text = f"(define (problem built)\n(:domain alfred)\n(:objects\n{listing}\n)\n(:init\n"
    text += "\n".join(f"({fact})" for fact in facts) + f"\n)\n{goal.strip()}\n"
    return text + ")" * (text.count("(") - text.count(")"))
