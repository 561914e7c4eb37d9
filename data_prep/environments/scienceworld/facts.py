"""Mark the texts of ScienceWorld that show contents of a room or container, and those that need them shown before.

    This room is called the kitchen. In it, you see: ..    needs and shows `in kitchen`
    a cupboard. .. In the cupboard is: ..                  what has a door needs `in cupboard`, wherever it is listed
    A door to the hallway (that is open)                   known from `in hallway`, too, and from going there
    a metal pot (containing nothing)                       known from any text that names a metal pot, but for lists
    Inside the jug is: ..                                  needs and shows `in jug`

A list that was seen stays known: changes by the agent follow from its actions. Spontaneous changes, as of animals and
temperatures, are not marked; nor is the inventory, which the agent fills, but it counts as naming its things.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from data_prep.environments.base import Need, TextFacts, needs_of_characters
from loopwm.records.names import names_pattern

_ROOM = re.compile(r"This (?:room|outside location) is called the ([^.\n]+)\. (?:In it, you|Here you) see: ")
_INSIDE = re.compile(r"Inside the ([^\n]+) is: ")
_SECTION = re.compile(
    r"(?P<door>is open\. )?\b(?:In|On) the (?P<holder>[^.:\n]+) is: "
    r"|(?:^|(?<=\t)|(?<=[:,] )|(?<=containing ))(?P<vessel>[^.,(\n\t:]+) \(containing "
)
_DOOR = re.compile(r"A door to the ([^(\n]+) \(that is \w+\)")
_GOING = re.compile(r"(?:go to (?:door to )?|You move (?:through the door )?to the )([^.]+)\.?")
_HEADER = re.compile(r"You also see:")
_THING = re.compile(
    r"(?:\n\t|is: (?!\n)|\(containing |, )(?!which is|currently|with: |nothing|A door to)"
    r"(?P<phrase>[^.,(\n)]+?)(?=its terminal|[.,(\n)]|$)"
)
_ARTICLE = re.compile(r"(?:an? |the )?(?:substance called )?", re.IGNORECASE)
_EVERYWHERE = {"agent", "air"}
"""Things that every room lists."""

_CARRIED = ("In your inventory, you see:", "Inside the inventory is:", "a inventory (containing")
_NO_LISTS = (*_CARRIED, "Ambiguous request")


@dataclass(frozen=True)
class _Listing:
    """Contents of a text's list.

    Attributes:
        parts: its parts that list what is in a place; the later of two parts holds where they overlap.
        things: start, end and name of each thing in it.
        shown: the places whose contents it lists.
    """

    parts: tuple[Need, ...]
    things: tuple[tuple[int, int, str], ...]
    shown: frozenset[str]


def listing_facts(texts: Sequence[str]) -> list[TextFacts]:
    """Return the facts of each of an episode's observations, looks, inventories and actions."""
    listings = [_listing(text) for text in texts]
    pattern = names_pattern({name for listing in listings if listing for *_, name in listing.things} - _EVERYWHERE)
    naming = cache(pattern.findall)  # an episode repeats nearly all of its lines
    mentions = [
        frozenset() if listing else frozenset(_named(text, naming))
        for text, listing in zip(texts, listings, strict=True)
    ]
    named = frozenset().union(*mentions)
    return [
        TextFacts(listing.shown, _needs(text, listing, named)) if listing else TextFacts(mentioned)
        for text, listing, mentioned in zip(texts, listings, mentions, strict=True)
    ]


@lru_cache(maxsize=10_000)
def _listing(text: str) -> _Listing | None:
    """Return the listing in a text, None if it lists no place."""
    if text.startswith(_NO_LISTS):
        return None
    parts: list[Need] = []
    shown: set[str] = set()
    place = _ROOM.match(text) or _INSIDE.match(text)
    if place:
        inside = _in(place[1])
        shown.add(inside)
        parts.append(Need(place.end(), len(text), frozenset({inside})))
        parts += [Need(*header.span(), frozenset()) for header in _HEADER.finditer(text)]
        parts += [
            Need(*door.span(), frozenset({inside, _in(door[1]), f"at {door[1]}"})) for door in _DOOR.finditer(text)
        ]
    for section in _SECTION.finditer(text):
        inside = _in(_name(section["holder"] or section["vessel"]))
        shown.add(inside)
        if section["door"] or not place:
            line_end = text.find("\n", section.end()) if place else -1
            parts.append(Need(section.end(), len(text) if line_end < 0 else line_end, frozenset({inside})))
    return _Listing(tuple(parts), tuple(_things(text)), frozenset(shown)) if parts else None


def _needs(text: str, listing: _Listing, named: Collection[str]) -> tuple[Need, ...]:
    """Return the needs of a text: its places or, for a thing named before, either of both."""
    facts: list[frozenset[str]] = [frozenset()] * len(text)
    for part in listing.parts:
        facts[part.start : part.end] = [part.facts] * (part.end - part.start)
    for start, end, name in listing.things:
        if name in _EVERYWHERE:
            facts[start - 2 : end] = [frozenset()] * (end - start + 2)  # with the line break and indent before it
        elif facts[start] and name in named:
            facts[start:end] = [facts[start] | {name}] * (end - start)
    return needs_of_characters(facts)


def _things(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and name of each listed thing."""
    return ((*match.span("phrase"), _name(match["phrase"])) for match in _THING.finditer(text))


def _named(text: str, naming: Callable[[str], list[str]]) -> set[str]:
    """Return the things that a text names, and the place that it goes to. naming: returns the names in a line."""
    if text.startswith(_CARRIED):
        return {name for *_, name in _things(text)}
    going = _GOING.fullmatch(text)
    return {name for line in text.split("\n") for name in naming(line)} | ({f"at {going[1]}"} if going else set())


def _name(phrase: str) -> str:
    return _ARTICLE.sub("", phrase, count=1).rstrip()


def _in(place: str) -> str:
    return f"in {place}"
