"""Names of ALFWorld's things, such as `countertop 2`."""

from __future__ import annotations

import re

from loopwm.records.names import TOKEN, Names

_NUMBERED = re.compile(r"\b[a-z]+ \d+\b")
_NUMBERED_OR_WORD = re.compile(rf"[a-z]+ \d+\b|{TOKEN.pattern}")


def numbered_names(text: str) -> frozenset[str]:
    return frozenset(_NUMBERED.findall(text.lower()))


NAMES = Names(numbered_names, numbered_names, split=lambda text: _NUMBERED_OR_WORD.findall(text.lower()))
