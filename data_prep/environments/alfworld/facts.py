"""Mark the texts of an ALFWorld game that list contents of a place, the only facts a player must have seen.

Doors are closed and lamps are off at the start of every game, and the effects of an action follow from it, so that only
lists of contents need to have been seen. A list follows from an earlier one of the same place and the actions since
then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from data_prep.environments.base import Need, TextFacts
from loopwm.records.names import TOKEN, Names

_NUMBERED = re.compile(r"\b[a-z]+ \d+\b")
_NUMBERED_OR_WORD = re.compile(rf"[a-z]+ \d+\b|{TOKEN.pattern}")


def numbered_names(text: str) -> frozenset[str]:
    return frozenset(_NUMBERED.findall(text.lower()))


NAMES = Names(numbered_names, numbered_names, split=lambda text: _NUMBERED_OR_WORD.findall(text.lower()))
"""Names of ALFWorld's things, such as `countertop 2`."""


_CONTENTS = re.compile(
    r"(?:On the (?P<surface>[a-z]+ \d+)"
    r"|The (?P<closable>[a-z]+ \d+) is open\. In it"
    r"|This is a normal (?P<vessel>[a-z]+ \d+)\. In it"
    r"), you see (?P<listed>[^.]*\.)"
)


def contents_facts(texts: Sequence[str]) -> list[TextFacts]:
    """Return facts of each text: names of the places and vessels whose contents it lists."""
    facts = []
    for text in texts:
        needs = tuple(
            Need(*match.span("listed"), frozenset({match["surface"] or match["closable"] or match["vessel"]}))
            for match in _CONTENTS.finditer(text)
        )
        facts.append(TextFacts(frozenset().union(*(need.facts for need in needs)), needs))
    return facts
