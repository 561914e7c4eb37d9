"""Rename the things of an episode consistently, so that a model must copy names and cannot recall them.

An environment's `kinds.json` lists names of interchangeable things: a permutation of a kind's stems is drawn for the
episode, and every whole-word occurrence in every text of it is replaced in one pass, longest names first, so that names
neither chain nor collide. All ways of writing a name are renamed: as the simulator prints it, and in small letters or
with a capital, as actions and answers have it.

Renamed texts are such that the simulator could have printed them, except for some names:

- ScienceWorld: colours of boxes, wires and bulbs, letters of unknown things and of inclined planes, fruit trees,
  animals except in tasks about their life span or growth, and substances that are melted, boiled or frozen except
  water. The splits differ in the last three: no fruit or substance that is grown or melted in training is so in a test,
  and so they also take names that the simulator does not have. Other materials and rooms keep their names, which imply
  their properties. Names of a kind take the same article ("a orange wire" is the simulator's own). Lists are sorted by
  name, and are not sorted again here: contents are nested, and some things are sorted by names that are not shown. A
  permutation that would put two names of a list in the wrong order is drawn again, and a kind for which DRAWS
  permutations fail keeps its names.
- ALFWorld: kinds of object that allow the same (be cleaned, heated, cooled, sliced, slice, hold things), and numbers
  within a kind, among those that occur. The receptacles that take a kind are ignored. Lists and the lines of the hidden
  state are sorted again, as the game sorts them. Receptacles keep their names: their kind opens, heats or cools, and
  their places belong to the floor plan.

The inverse restores every text byte for byte: each is checked, and an episode that fails is not renamed.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import combinations
from random import Random
from typing import Any

from data_prep.environments import declared
from data_prep.environments.alfworld.hidden import joined, listed
from loopwm.records.episodes import Episode
from loopwm.records.names import names_pattern

DRAWS = 20
"""Permutations tried for a kind in an episode."""


class RenamingError(ValueError):
    """Renaming that cannot be undone. The message names the text's part at fault."""


@dataclass(frozen=True)
class Kind:
    """Names "a seed", "a tree", ... of interchangeable things: forms, in which `{}` stands for the stem.

    barred: tasks with these prefixes leave the names alone. apart: phrases that stay unchanged, because their names
    denote things of every world.
    """

    forms: tuple[str, ...]
    stems: tuple[str, ...]
    barred: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()

    def names(self, stem: str) -> Iterator[str]:
        """Yield the names of a stem as written: as given, in small letters, with a capital."""
        for form in self.forms:
            name = form.format(stem)
            yield from (name, name.lower(), name[0].upper() + name[1:])

    def mapping(self, permutation: Mapping[str, str]) -> dict[str, str]:
        return {
            name: new
            for stem, other in permutation.items()
            for name, new in zip(self.names(stem), self.names(other), strict=True)
        } | dict(zip(self.apart, self.apart, strict=True))

    def without_apart(self, text: str) -> str:
        for phrase in self.apart:
            text = text.replace(phrase, "")
        return text


@cache
def load_kinds(env: str) -> tuple[Kind, ...]:
    """Load the kinds of an environment; none if it declares none."""
    path = declared(env).kinds
    records = json.loads(path.read_bytes()) if path else []
    return tuple(Kind(**{name: tuple(values) for name, values in record.items()}) for record in records)


@dataclass(frozen=True)
class Renaming:
    """Bijection of names. tidy: sorts the lists of a renamed text."""

    names: Mapping[str, str]
    tidy: Callable[[str], str] = str

    def __post_init__(self) -> None:
        assert set(self.names) == set(self.names.values())

    def apply(self, text: str) -> str:
        return self.tidy(self.substitute(text))

    def substitute(self, text: str) -> str:
        """Rename in a text. Names do not cross lines, of which an episode repeats nearly all."""
        return "\n".join(map(self._line, text.split("\n")))

    @cached_property
    def _line(self) -> Callable[[str], str]:
        pattern = _any_of(frozenset(self.names))
        return cache(lambda line: pattern.sub(lambda match: self.names[match[0]], line))

    def inverse(self) -> Renaming:
        return Renaming({new: name for name, new in self.names.items()}, self.tidy)


_any_of = lru_cache(maxsize=256)(names_pattern)  # episodes of an environment share kinds


def rename_episode(episode: Episode, rng: Random, kinds: Sequence[Kind] | None = None) -> Episode:
    """Return the episode with its things renamed; unchanged if there is nothing to rename.

    kinds: those of the environment by default. Raises RenamingError if the inverse would not restore a text.
    """
    kinds = load_kinds(episode.env) if kinds is None else kinds
    allowed = [kind for kind in kinds if not episode.task.startswith(kind.barred)]
    texts = sorted(set(_texts(episode)))
    draw = draw_numbered if declared(episode.env).numbered else draw_in_order
    renaming = draw(texts, allowed, rng)
    if all(name == new for name, new in renaming.names.items()):
        return episode
    back = renaming.inverse()
    renamed = {text: renaming.apply(text) for text in texts}
    for text, new in renamed.items():
        if back.apply(new) != text:
            raise RenamingError(f"a name would collide with another in {_first_difference(text, back.apply(new))!r}")
    return _map_texts(episode, renamed)


def _texts(episode: Episode) -> Iterator[str]:
    steps = ((s.action, s.observation, s.look, s.inventory, s.hidden_state) for s in episode.steps)
    texts = (episode.goal, episode.hidden_state, *(text for step in steps for text in step))
    return (text for text in texts if text is not None)


def _map_texts(episode: Episode, new: Mapping[str, str]) -> Episode:
    def mapped(thing: Any, *fields: str) -> Any:
        texts = {name: getattr(thing, name) for name in fields}
        return replace(thing, **{name: text if text is None else new[text] for name, text in texts.items()})

    fields = ("action", "observation", "look", "inventory", "hidden_state")
    steps = tuple(mapped(step, *fields) for step in episode.steps)
    return replace(mapped(episode, "goal", "hidden_state"), steps=steps)


def _first_difference(text: str, other: str) -> str:
    lines = zip(text.splitlines(), [*other.splitlines(), *text.splitlines()], strict=False)
    return next((line for line, restored in lines if line != restored), text)[:60]


def draw_in_order(texts: Sequence[str], kinds: Sequence[Kind], rng: Random) -> Renaming:
    """Draw a permutation for each kind that occurs, such that all lists of the texts stay sorted."""
    names: dict[str, str] = {}
    keys_of = cache(lambda text: [tuple(keys) for keys in list_keys(text)])
    for kind in kinds:
        pattern = _any_of(frozenset(kind.mapping(dict(zip(kind.stems, kind.stems, strict=True)))))
        occurs = cache(pattern.search)  # in a line, of which texts share nearly all, or in a key
        named = [text for text in map(kind.without_apart, texts) if any(map(occurs, text.split("\n")))]
        if named:
            theirs = [keys for keys in {keys for text in named for keys in keys_of(text)} if any(map(occurs, keys))]
            names |= _draw_permutation(kind, theirs, names, rng)
    return Renaming(names, sort_temperatures)


def _draw_permutation(
    kind: Kind, lists: Collection[Sequence[str]], names: Mapping[str, str], rng: Random
) -> dict[str, str]:
    """Draw a kind's names such that the lists stay sorted together with names drawn before; empty if none is found."""
    for _ in range(DRAWS):
        permutation = kind.mapping(dict(zip(kind.stems, rng.sample(kind.stems, len(kind.stems)), strict=True)))
        renaming = Renaming({**names, **permutation})
        if all(keeps_order(keys, [renaming.substitute(key) for key in keys]) for keys in lists):
            return permutation
    return {}


def keeps_order(keys: Sequence[str], renamed: Sequence[str]) -> bool:
    """Return True if sorted names stay sorted; unsorted pairs may be sorted by something not shown."""
    pairs = zip(combinations(keys, 2), combinations(renamed, 2), strict=True)
    return all(one < other for (first, second), (one, other) in pairs if first < second)


_ARTICLE = re.compile(r"^(?:a|an|the) (?:substance called )?(?:(?:adult|baby|juvenile|newborn|young|dead) )?")
_ITEM_START = re.compile(r", |: |\(containing ")
_TEMPERATURE = re.compile(r"^(temperature -?[\d.]+: )(.*)$", re.MULTILINE)


def list_keys(text: str) -> Iterator[list[str]]:
    """Yield possible sort keys of ScienceWorld's lists: starts of consecutive indented lines and of sentence parts.

    Lists of `sort_temperatures` are left out.
    """
    block: list[str] = []
    for line in _TEMPERATURE.sub("", text).split("\n"):
        sentences = _sentences(line)
        yield from (parts for parts in sentences if len(parts) > 1)
        if line.startswith("\t"):
            block.append(re.split(r" \(", sentences[0][0])[0])
        elif block:
            yield block
            block = []
    if block:
        yield block


@lru_cache(maxsize=100_000)
def _sentences(line: str) -> list[list[str]]:
    """Return the names in the parts of each sentence of a line."""
    return [[_ARTICLE.sub("", part.strip()) for part in _ITEM_START.split(one)] for one in line.split(". ")]


def sort_temperatures(text: str) -> str:
    """Sort the things of a temperature in the hidden state."""
    return _TEMPERATURE.sub(lambda match: match[1] + ", ".join(sorted(match[2].split(", "))), text)


_NUMBERED = r"[a-z]+ \d+"
_LIST = re.compile(rf"(?:a )?{_NUMBERED}(?:, (?:and )?(?:a )?{_NUMBERED})+")
_SORTED_LINES = (  # lines about things in the hidden state
    re.compile(rf"In the ({_NUMBERED}), you see .*"),
    re.compile(rf"The ({_NUMBERED}) is (?:hot|cold|clean|sliced).*"),
)


def sort_alfworld(text: str) -> str:
    """Sort lists, and lines about things, in the order of the game."""
    lines = _LIST.sub(_sorted_list, text).split("\n")
    for pattern in _SORTED_LINES:
        places = [i for i, line in enumerate(lines) if pattern.fullmatch(line)]
        in_order = sorted((lines[i] for i in places), key=lambda line: listed(pattern.sub(r"\1", line)))
        for i, line in zip(places, in_order, strict=True):
            lines[i] = line
    return "\n".join(lines)


def _sorted_list(match: re.Match[str]) -> str:
    article = "a " if match[0].startswith("a ") else ""
    names = sorted(re.findall(_NUMBERED, match[0].replace(", a ", ", ").removeprefix("a ")), key=listed)
    return joined([article + name for name in names])


def draw_numbered(texts: Sequence[str], kinds: Sequence[Kind], rng: Random) -> Renaming:
    """Draw a permutation of each kind's words, and of the numbers that occur with a word."""
    most: dict[str, int] = defaultdict(int)
    for word, number in re.findall(r"([a-z]+) (\d+)", "\n".join(texts)):
        most[word] = max(most[word], int(number))
    names: dict[str, str] = {}
    for kind in kinds:
        greatest = max(most[stem] for stem in kind.stems)
        for stem, other in zip(kind.stems, rng.sample(kind.stems, len(kind.stems)), strict=True):
            numbers = rng.sample(range(1, most[stem] + 1), most[stem])
            numbers += range(most[stem] + 1, greatest + 1)
            names[stem] = other
            names |= {f"{stem} {i}": f"{other} {number}" for i, number in enumerate(numbers, start=1)}
    return Renaming(names, sort_alfworld)
