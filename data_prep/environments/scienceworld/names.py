"""Names of ScienceWorld's things: the longest matches of a committed list.

The list holds its objects, substances and locations (`entities.txt`, built by `python -m lab build-entities`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from loopwm.records.names import NameList, Names

ENTITIES = Path(__file__).with_name("entities.txt")


@cache
def name_list() -> NameList:
    return NameList(ENTITIES.read_text(encoding="utf-8").splitlines())


NAMES = Names(
    named=lambda text: name_list().longest(text),
    mentioned=lambda text: name_list().anywhere(text),
    split=lambda text: name_list().split(text),
)
