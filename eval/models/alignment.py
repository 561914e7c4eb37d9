"""Align two places: map the things of one to the things of the other.

Actions of both are aligned name by name. An action may name a thing by its last word (`block`), so each name is first
completed from the latest observation that has it (`steel block`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache

from loopwm.records.names import Names

LONGEST = 8
"""Most names and words of a difference that count as another name; more is another sentence."""

SHORT = 2
"""A letter or number of at most this many characters belongs to the word before it (`vial C`)."""

_NUMBER = re.compile(r"\d")
_LETTER = re.compile(r"\b[a-z]$")


class Scene:
    """Names of the things observed at a place, the last observation first."""

    def __init__(self, observations: Sequence[str], names: Names) -> None:
        self._observations = observations
        self._lower = "\n".join(observations).lower()
        self._known = dict.fromkeys(name for text in observations for name in _sorted_names(text, names))

    def knows(self, name: str) -> bool:
        return name in self._known or name in self._lower

    def complete(self, name: str) -> str:
        """Return the name itself if it was observed, else the latest observed name that ends with it."""
        if name in self._known:
            return name
        return next((full for full in self._known if full.endswith(f" {name}")), name)

    def spell(self, name: str) -> str:
        """Return the name in the case of the latest observation; actions ignore case."""
        pattern = re.compile(rf"\b{re.escape(name)}\b", re.IGNORECASE)
        return next((match[0] for text in self._observations if (match := pattern.search(text))), name)


@cache
def _sorted_names(text: str, names: Names) -> list[str]:
    return sorted(names.named(text))


def aligned(old: str, new: str, names: Names) -> Iterator[tuple[str, str]]:
    """Yield (part of `old`, aligned part of `new`), equal parts too. Yields nothing if they share no word.

    Equal numbers of parts are paired one by one, others by their longest common runs.
    """
    parts, others = names.split(old), names.split(new)
    if not set(parts) & set(others):
        return
    for start, end, its_start, its_end in _spans(parts, others):
        if max(end - start, its_end - its_start) > LONGEST:
            continue
        differ = parts[start:end] != others[its_start:its_end]
        short = max(map(len, parts[start:end] + others[its_start:its_end])) <= SHORT
        back = 1 if differ and short and min(start, its_start) > 0 else 0
        yield " ".join(parts[start - back : end]), " ".join(others[its_start - back : its_end])


def _spans(parts: Sequence[str], others: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, end, start, end) of aligned spans; equal parts one by one."""
    if len(parts) == len(others):
        yield from ((i, i + 1, i, i + 1) for i in range(len(parts)))
        return
    # autojunk would ignore the frequent words of long texts.
    for kind, i, end_i, j, end_j in SequenceMatcher(None, parts, others, autojunk=False).get_opcodes():
        if kind == "equal":
            yield from ((i + n, i + n + 1, j + n, j + n + 1) for n in range(end_i - i))
        elif kind == "replace":
            yield i, end_i, j, end_j


def renaming(
    actions: Sequence[tuple[str, str]], observations: Sequence[tuple[str, str]], old: Scene, new: Scene, names: Names
) -> dict[str, str]:
    """Map each name of the old world to its counterpart in the new one. Of pairs that differ, the first counts.

    actions, observations: (there, here) of the same step, the last first. Names in the first action, the one to
    predict, are always renamed; other names only if the new world does not have them as well.
    """
    mapping: dict[str, str] = {}
    for i, (there, here) in enumerate(actions):
        for part, other in aligned(there, here, names):
            whole, its = old.complete(part), new.complete(other)
            if (part != other or new.knows(its)) and (i == 0 or _differ(whole, its, old, new)):
                mapping.setdefault(whole, its)
            if i == 0 or _differ(part, other, old, new):
                mapping.setdefault(part, other)
    for there, here in observations:
        for part, other in aligned(there, here, names):
            if _are_names(part, other, names) and _differ(part, other, old, new):
                mapping.setdefault(part, other)
    return {name: new.spell(other) for name, other in mapping.items() if name != other}


def _differ(name: str, other: str, old: Scene, new: Scene) -> bool:
    """Return True if neither world has both names, so that they may denote one thing."""
    return name == other or not (new.knows(name) or old.knows(other))


def _are_names(part: str, other: str, names: Names) -> bool:
    """Return True if the parts differ in names; they may differ in states or numbers only."""
    if any(text not in names.named(text) and _NUMBER.search(text) for text in (part, other)):
        return False
    return bool(names.named(part) and names.named(other)) or _LETTER.sub("", part) == _LETTER.sub("", other)


def rename(text: str, renamed: Mapping[str, str], names: Names) -> str:
    """Rename every occurrence at once, in any case, except inside a longer name that stays."""
    if not renamed:
        return text
    kept_or_renamed = {**dict.fromkeys(names.named(text)), **renamed}
    longest_first = sorted(kept_or_renamed, key=len, reverse=True)
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, longest_first))})\b", re.IGNORECASE | re.ASCII)
    return pattern.sub(lambda name: kept_or_renamed[name[0].lower()] or name[0], text)
