"""Content of a page, independent of its format. A page has sections; a section has blocks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal


@dataclass(frozen=True)
class Text:
    paragraph: str


@dataclass(frozen=True)
class Table:
    """Table. A line break in a cell starts a new line in it."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Plots:
    """Plots, side by side if there is room."""

    plots: Sequence[Plot]


@dataclass(frozen=True)
class Plot:
    """Plot. name: unique on the page, also the file name; svg: an <svg> element."""

    name: str
    title: str
    svg: str


@dataclass(frozen=True)
class Miss:
    """Wrong prediction: its place, the action, its scores, and the difference from the truth."""

    title: str
    action: str
    scores: str
    spans: Sequence[Span]


@dataclass(frozen=True)
class Misses:
    misses: Sequence[Miss]


@dataclass(frozen=True)
class Fold:
    """Collapsed blocks."""

    title: str
    blocks: Sequence[Block]


Block = Text | Table | Plots | Misses | Fold


@dataclass(frozen=True)
class Section:
    """Section. anchor: unique on the page; level: 2 for a chapter, 3 for a part of one."""

    title: str
    anchor: str
    level: int
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    title: str
    lead: str
    sections: Sequence[Section]
    made_by: str


Change = Literal["same", "missing", "added"]
_PIECES = re.compile(r"^\s+|\w+\s*|[^\w\s]\s*")


@dataclass(frozen=True)
class Span:
    """Span of a diff: in both texts, only in the true observation, or only in the prediction."""

    kind: Change
    text: str


def word_diff(reference: str, prediction: str) -> list[Span]:
    """Diff two texts. `same` and `missing` joined are the reference, `same` and `added` the prediction."""
    a, b = _PIECES.findall(reference), _PIECES.findall(prediction)
    spans: list[Span] = []
    for tag, a0, a1, b0, b1 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            spans.append(Span("same", "".join(a[a0:a1])))
            continue
        if a1 > a0:
            spans.append(Span("missing", "".join(a[a0:a1])))
        if b1 > b0:
            spans.append(Span("added", "".join(b[b0:b1])))
    return spans
