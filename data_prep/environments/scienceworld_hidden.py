"""What ScienceWorld keeps from the agent: how every room looks now, and the facts that its tasks ask to find out.

Read from the simulator's objects over py4j, so it costs no step. One fact a line:

    unknown substance C: melting point 115, conducts electricity
    inclined plane with a unknown material H surface: angle 45, friction 0.9
    unknown E: blue seed color is dominant, brown seed color is recessive
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

_PLACES = ("Room", "Outside")
_OBJECT = re.compile(r"ObjectID \(\d+, name: (?P<name>.*?), type: (?P<type>.*?)\)\), Contents")
_CURSORY = 0
"""The simulator's MODE_CURSORY_DETAIL: what `look around` prints."""


def describe_hidden_state(jvm: Any, universe: Any) -> str:
    """Rooms by name, then facts in alphabetical order. Raises py4j's Py4JError if the simulator fails."""
    contents = list(jvm.scala.collection.JavaConverters.setAsJavaSet(universe.getContainedObjects(True)))
    places = sorted((thing.getName(), thing) for thing in contents if _kind(thing) in _PLACES)
    rooms = [place.getDescription(_CURSORY).strip() for _, place in places]
    facts = {fact for thing in _telling_objects(universe) for fact in _facts(thing)}
    return "\n".join((*rooms, *sorted(facts)))


def _kind(thing: Any) -> str:
    return str(thing.getClass().getSimpleName())


def _telling_objects(universe: Any) -> Iterator[Any]:
    """Objects that may hide a fact. A world has 400, and each question to one is a round trip: names come in one."""
    everything = universe.getContainedObjectsRecursive().toSeq()
    for index, found in enumerate(_OBJECT.finditer(everything.toString())):
        if found["type"] == "plant" or "unknown substance" in found["name"] or found["name"] == "inclined plane":
            yield everything.apply(index)


def _facts(thing: Any) -> Iterator[str]:
    kind = _kind(thing)
    if kind.startswith("UnknownSubstance"):
        yield _substance_fact(thing)
    elif kind == "InclinedPlane":
        friction = thing.surfaceMaterial().frictionCoefficient()
        yield f"{thing.getDescriptName('')}: angle {thing.angleDeg():g}, friction {friction:g}"
    genes = thing.propChromosomePairs()
    if genes.isDefined():
        yield from _trait_facts(thing.getName().removesuffix(" seed"), genes.get().getPhenotypes())


def _substance_fact(thing: Any) -> str:
    material = thing.propMaterial().get()
    conducts = "conducts" if material.electricallyConductive() else "does not conduct"
    return f"{thing.getName()}: melting point {material.meltingPoint():g}, {conducts} electricity"


def _trait_facts(plant: str, traits: Iterable[Any]) -> Iterator[str]:
    for trait in traits:
        name, dominant, recessive = trait.traitName(), trait.valueDominant(), trait.valueRecessive()
        yield f"{plant}: {dominant} {name} is dominant, {recessive} {name} is recessive"
