"""Facts that texts of an episode show and need, so that training can tell targets that no earlier text determines.

A fact is any string, such as the name of a place whose contents a text lists. A part of a text needs facts if only a
reader who knows one of them can predict it; a fact is known once a text that shows it was read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Need:
    """Part text[start:end], determined if one of `facts` is known."""

    start: int
    end: int
    facts: frozenset[str]


@dataclass(frozen=True)
class TextFacts:
    """Facts that a text shows, and its parts that need some."""

    shows: frozenset[str] = frozenset()
    needs: tuple[Need, ...] = ()


def needs_of_characters(facts: Iterable[frozenset[str]]) -> tuple[Need, ...]:
    """Return the needs of the longest runs of characters with equal facts; characters without facts have none."""
    needs, start = [], 0
    for known_by, run in groupby(facts):
        end = start + len(list(run))
        if known_by:
            needs.append(Need(start, end, known_by))
        start = end
    return tuple(needs)
