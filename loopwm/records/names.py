"""Names of things in texts, for environments that list the names in their observations."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

TOKEN = re.compile(r"[a-z0-9]+(?:[-'][a-z0-9]+)*|[^\sa-z0-9]")
"""A word or a mark, in lower case."""

Extractor = Callable[[str], frozenset[str]]


@dataclass(frozen=True)
class Names:
    """named: the entities of an observation. mentioned: every name in a text, also inside longer names.

    split: a text's words and marks in order, lower-case, names in one piece.
    """

    named: Extractor
    mentioned: Extractor
    split: Callable[[str], list[str]]


def names_pattern(names: Collection[str]) -> re.Pattern[str]:
    """Return a pattern of whole names, the longest first; it matches nothing without names."""
    longest_first = sorted(map(re.escape, names), key=len, reverse=True)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(longest_first) or '(?!)'})(?![\w-])")


class NameList:
    """A list of names, matched in text by whole words, ignoring case. Names do not cross punctuation."""

    def __init__(self, names: Iterable[str]) -> None:
        self._by_first_word: dict[str, list[list[str]]] = defaultdict(list)
        for name in sorted(names, key=lambda name: len(name.split()), reverse=True):
            words = TOKEN.findall(name.lower())
            if words:
                self._by_first_word[words[0]].append(words)

    def longest(self, text: str) -> frozenset[str]:
        """Return the names matched from left to right, the longest at each place."""
        return frozenset(part for part, is_name in self._read(text) if is_name)

    def split(self, text: str) -> list[str]:
        """Split into words and marks in order, lower-case, each of the names of `longest` in one piece."""
        return [part for part, _ in self._read(text)]

    def _read(self, text: str) -> Iterator[tuple[str, bool]]:
        words = TOKEN.findall(text.lower())
        start = 0
        while start < len(words):
            name = next(self._starting(words, start), None)
            length = len(name) if name else 1
            yield " ".join(words[start : start + length]), name is not None
            start += length

    def anywhere(self, text: str) -> frozenset[str]:
        """Return every name that occurs, also inside a longer one (`apple` in `red apple`)."""
        words = TOKEN.findall(text.lower())
        return frozenset(" ".join(name) for start in range(len(words)) for name in self._starting(words, start))

    def _starting(self, words: list[str], start: int) -> Iterator[list[str]]:
        """Yield the names that start at a word, the longest first."""
        candidates = self._by_first_word.get(words[start], ())
        return (name for name in candidates if words[start : start + len(name)] == name)
