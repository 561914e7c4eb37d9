"""Render what an ALFWorld game hides: with look and inventory, it determines all of the game's answers.

    The fridge 1 is closed. In it, you see a mug 2, and a mug 1.     each receptacle within reach
    On the drawer 2, you see a pan 1.                                one that does not open
    Facing the drawer 2, and drawer 1. Next to it, you see a pan 1. You took a pan 1 from the drawer 1.
    In the bowl 1, you see a spoon 1.                                things that hold others
    The desklamp 1 is off.                                           things to switch
    The mug 1 is hot and clean.                                      things in a special state

The order is that of the game's own lists: kind ascending, number descending. The third line is for receptacles reached
from one place, where `look` answers so: by the grammar, a thing lies next to the receptacles if it lies at the place
and was once taken from one of them, even if it lies in another by now.

Properties of a kind are left out: what can be taken, opens with another word, holds what, gets hot, cold, clean or
sliced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from data_prep.environments.alfworld.expert import Situation, natural

STATES = {"ishot": "hot", "iscool": "cold", "isclean": "clean", "issliced": "sliced"}


def listed(name: str) -> tuple[str, int]:
    """Return a key in the order of the game's lists: `drawer 10`, `drawer 9`, `fridge 1`."""
    kind, number = natural(name)
    return kind, -number


def describe(world: Situation) -> str:
    """Return the hidden state of one moment."""
    parts = (_receptacles, _shared_places, _vessels, _switches, _special_states)
    return "\n".join(line for part in parts for line in part(world))


def _receptacles(world: Situation) -> Iterator[str]:
    for receptacle in sorted(world.contents, key=listed):
        things = _articled(world.contents[receptacle])
        if world.true("openable", receptacle):
            state = "closed" if world.closed(receptacle) else "open"
            yield f"The {receptacle} is {state}. In it, you see {things}."
        else:
            yield f"On the {receptacle}, you see {things}."


def _shared_places(world: Situation) -> Iterator[str]:
    places = defaultdict(list)
    for receptacle in sorted(world.spots, key=listed):
        places[world.spots[receptacle]].append(receptacle)
    # Things once in a receptacle and no more: the engine records facts that became false, not those always false.
    former = world.facts["not_inreceptacle"]
    departures = {spot: [thing for thing, place in former if place == spot] for spot in world.spots}
    for place, receptacles in places.items():
        if len(receptacles) > 1:
            here = {thing for thing, where in world.facts["objectatlocation"] if where == place}
            # a thing taken from two of them is listed twice, as the game does
            beside = [thing for receptacle in receptacles for thing in departures[receptacle] if thing in here]
            line = f"Facing the {joined(receptacles)}. Next to it, you see {_articled(beside)}."
            yield line + "".join(
                f" You took {_articled(departures[r])} from the {r}." for r in receptacles if departures[r]
            )


def _vessels(world: Situation) -> Iterator[str]:
    contents = defaultdict(list)
    for thing, vessel in world.facts["inreceptacleobject"]:
        contents[vessel].append(thing)
    for vessel in sorted(contents, key=listed):
        yield f"In the {vessel}, you see {_articled(contents[vessel])}."


def _switches(world: Situation) -> Iterator[str]:
    for thing in sorted((thing for (thing,) in world.facts["toggleable"]), key=listed):
        yield f"The {thing} is {'on' if world.true('istoggled', thing) else 'off'}."


def _special_states(world: Situation) -> Iterator[str]:
    states: dict[str, list[str]] = defaultdict(list)
    for predicate, word in STATES.items():
        for (thing,) in world.facts[predicate]:
            states[thing].append(word)
    for thing in sorted(states, key=listed):
        yield f"The {thing} is {' and '.join(states[thing])}."


def _articled(things: Iterable[str]) -> str:
    return joined([f"a {thing}" for thing in sorted(things, key=listed)])


def joined(words: Sequence[str]) -> str:
    """Join words as the game joins a list."""
    *others, last = words or ["nothing"]
    return f"{', '.join(others)}, and {last}" if others else last
