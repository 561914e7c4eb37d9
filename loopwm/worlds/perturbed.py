"""Worlds that are disturbed on purpose: an agent that trains in them meets refusals and things that change.

At a rate, drawn with a seed, a step is disturbed:

- refuse: the action is not carried out
- break: nor is it, or any later action that names one of its things
- hide: a thing that the observation lists is gone
- move: it is gone here, and shown in the next list of another step
- rename: from now on observations have another name for it; in actions both work

All but new names are told to the world, whose next observations follow from them. `ledger` says what was changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal, NamedTuple, get_args

from loopwm.records.template import Context, FormatError
from loopwm.worlds.protocol import Imagined, RowWorlds, check_lengths, longer

Kind = Literal["refuse", "break", "hide", "move", "rename"]
KINDS: tuple[Kind, ...] = get_args(Kind)
REFUSAL = "Nothing happens."
"""ALFWorld's answer to what it refuses."""
ADJECTIVES = ("plain", "odd", "grey", "worn", "spare")

_INLINE = re.compile(r"(?<=you see )an? [^.\n]+(?=\.)")
"""ALFWorld's lists: a mug 1, a pen 2, and a book 1."""
_SEPARATOR = re.compile(r", (?:and )?")
_LINE = re.compile(r"^\t(an? [^.,:(\n]+)(?:\n|\Z)", re.MULTILINE)
"""ScienceWorld's lists: a thing a line; those that are described beside their name stay."""


class Change(NamedTuple):
    """Disturbance of a row. step: of the row, from 1. thing: its name, "" for a refusal. to: its new name."""

    step: int
    kind: Kind
    thing: str = ""
    to: str = ""


@dataclass
class _Row:
    """A row: its context up to the last real step, and up to now with the world's own names, and what was changed.

    moving: things on their way to another place
    """

    real: Context
    context: Context
    random: Random
    ledger: list[Change] = field(default_factory=list)
    steps: int = 0
    moving: list[str] = field(default_factory=list)

    def things(self, *kinds: Kind) -> list[str]:
        return [change.thing for change in self.ledger if change.kind in kinds]

    @property
    def names(self) -> dict[str, str]:
        """Return new names by old ones."""
        return {change.thing: change.to for change in self.ledger if change.kind == "rename"}

    def with_own_names(self, action: str) -> str:
        """Return an action in the names that the world knows."""
        return _renamed(action, {new: old for old, new in self.names.items()})


class PerturbedWorlds:
    """Worlds around others, disturbed at a rate. Forks are disturbed as their rows would be."""

    def __init__(
        self, worlds: RowWorlds, rate: float, seed: int = 0, kinds: Sequence[Kind] = KINDS, refusal: str = REFUSAL
    ) -> None:
        """Disturb worlds.

        Args:
            worlds: not begun yet.
            rate: probability that a step is disturbed, in [0, 1].
            seed: of the draws, which differ by row.
            kinds: drawn from with equal chances; a kind that does not apply changes nothing.
            refusal: the environment's answer to what it refuses.

        Raises:
            FormatError: for a rate outside [0, 1], and for unknown kinds or none
        """
        if not 0 <= rate <= 1:
            raise FormatError("rate", f"must be in [0, 1], got {rate}")
        if not kinds or set(kinds) - set(KINDS):
            raise FormatError("kinds", f"must be of {', '.join(KINDS)}, got {', '.join(kinds) or 'none'}")
        self._worlds, self._rate, self._random = worlds, rate, Random(seed)
        self._kinds, self._refusal = tuple(kinds), refusal
        self._rows: list[_Row] = []

    @property
    def ledger(self) -> list[list[Change]]:
        """Return what was changed in each row since it began."""
        return [list(row.ledger) for row in self._rows]

    @property
    def steps_cut(self) -> tuple[int, ...]:
        return self._worlds.steps_cut

    def begin(self, contexts: Sequence[Context]) -> None:
        self._worlds.begin(contexts)
        self._rows = [self._row(context) for context in contexts]

    def restart(self, rows: Sequence[int], contexts: Sequence[Context]) -> None:
        """Replace these rows by new worlds; the others continue."""
        self._worlds.restart(rows, contexts)
        for row, context in zip(rows, contexts, strict=True):
            self._rows[row] = self._row(context)

    def step(self, actions: Sequence[str], decode: bool = True, rows: Sequence[int] | None = None) -> list[Imagined]:
        """Step the given rows, None for all. Texts are always decoded; without `decode` they are not returned."""
        places = list(range(len(self._rows)) if rows is None else rows)
        stepping = [self._rows[place] for place in places]
        own = [row.with_own_names(action) for row, action in zip(stepping, actions, strict=True)]
        imagined = self._worlds.step(own, rows=places)
        results = [self._disturbed(*step) for step in zip(stepping, own, imagined, strict=True)]
        changed = [place for place, before, after in zip(places, imagined, results, strict=True) if before != after]
        self._worlds.restart(changed, [self._rows[place].context for place in changed])
        return [
            replace(one, observation=_renamed(one.observation, row.names) if decode else "")
            for row, one in zip(stepping, results, strict=True)
        ]

    def fork(self, rows: Sequence[int]) -> PerturbedWorlds:
        fork = PerturbedWorlds(self._worlds.fork(rows), self._rate, 0, self._kinds, self._refusal)
        fork._rows = [deepcopy(self._rows[row]) for row in rows]
        return fork

    def observe(self, actions: Sequence[str], observations: Sequence[str]) -> None:
        """Append real steps, which are not disturbed and have the world's own names."""
        check_lengths(len(self._rows), actions=actions, observations=observations)
        for row, *step in zip(self._rows, actions, observations, strict=True):
            row.real = row.context = longer(row.real, *step)
        self._worlds.restart(range(len(self._rows)), [row.real for row in self._rows])

    def close(self) -> None:
        self._worlds.close()

    def _row(self, context: Context) -> _Row:
        return _Row(context, context, Random(self._random.random()))

    def _disturbed(self, row: _Row, action: str, imagined: Imagined) -> Imagined:
        """Return the step as it is after what was changed before, and after a disturbance if one is drawn."""
        if imagined.finish == "full":
            return imagined
        row.steps += 1
        kind = row.random.choice(self._kinds) if row.random.random() < self._rate else None
        gone = any(_names(action, thing) for thing in (*row.things("break", "hide"), *row.moving))
        if gone or self._refuses(row, kind, action):
            # no reward, no end, and no trust, which was in another text
            points = None if imagined.reward is None else 0.0
            mean = None if imagined.expected_reward is None else 0.0
            going = None if imagined.continuation is None else 1.0
            accepted = None if imagined.acceptance is None else 0.0
            imagined = Imagined(self._refusal, points, going, acceptance=accepted, expected_reward=mean)
        else:
            imagined = replace(imagined, observation=self._edited(row, kind, imagined.observation))
        row.context = longer(row.context, action, imagined.observation)
        return imagined

    def _refuses(self, row: _Row, kind: Kind | None, action: str) -> bool:
        """Return True, and note it, if the action is refused, or breaks the thing that it names."""
        if kind == "refuse":
            row.ledger.append(Change(row.steps, kind))
            return True
        known = {thing for step in row.context.history for thing in things_in(step.observation)}
        named = sorted(thing for thing in known | set(things_in(row.context.observation)) if _names(action, thing))
        if kind != "break" or not named:
            return False
        row.ledger.append(Change(row.steps, kind, row.random.choice(named)))
        return True

    def _edited(self, row: _Row, kind: Kind | None, text: str) -> str:
        """Return an observation after what is hidden, moved there, and disturbed now."""
        for thing in row.things("hide"):
            text = without(text, thing)
        if row.moving and things_in(text):
            text, row.moving = with_things(text, row.moving), []
        listed = [thing for thing in things_in(text) if thing not in row.names]
        if kind not in ("hide", "move", "rename") or not listed:
            return text
        thing = row.random.choice(listed)
        new = f"{row.random.choice(ADJECTIVES)} {thing}" if kind == "rename" else ""
        row.ledger.append(Change(row.steps, kind, thing, new))
        row.moving += [thing] if kind == "move" else []
        return text if kind == "rename" else without(text, thing)


def things_in(text: str) -> list[str]:
    """Return the names that an observation lists, without articles."""
    inline = [item for items in _INLINE.findall(text) for item in _SEPARATOR.split(items)]
    return [item.partition(" ")[2] for item in (*inline, *_LINE.findall(text))]


def without(text: str, thing: str) -> str:
    """Return the text with one thing out of its lists."""

    def others(items: Sequence[str]) -> list[str]:
        return [item for item in items if item.partition(" ")[2] != thing]

    text = _INLINE.sub(lambda match: _list(others(_SEPARATOR.split(match[0]))), text)
    return _LINE.sub(lambda match: match[0] if others([match[1]]) else "", text)


def with_things(text: str, things: Sequence[str]) -> str:
    """Return the text with things at the head of its first list, which must exist."""
    items = [f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}" for thing in things]
    if _INLINE.search(text):
        return _INLINE.sub(lambda match: _list([*items, *_SEPARATOR.split(match[0])]), text, count=1)
    return _LINE.sub(lambda match: "".join(f"\t{item}\n" for item in items) + match[0], text, count=1)


def _list(items: Sequence[str]) -> str:
    """Write a list as ALFWorld does."""
    if len(items) < 2:
        return items[0] if items else "nothing"
    return ", ".join(items[:-1]) + f", and {items[-1]}"


def _names(text: str, thing: str) -> bool:
    return re.search(rf"\b{re.escape(thing)}\b", text) is not None


def _renamed(text: str, names: dict[str, str]) -> str:
    """Return the text with whole names replaced, all at once."""
    if not names:
        return text
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(rf"\b({pattern})\b", lambda match: names[match[1]], text)
