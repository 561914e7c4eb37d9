"""What a page is made of, whatever it is written in. A page is sections; a section is blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.reports.word_diff import Span


@dataclass(frozen=True)
class Text:
    paragraph: str


@dataclass(frozen=True)
class Table:
    """A line break in a cell starts a new line in it."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Plots:
    """Plots that stand side by side where there is room."""

    plots: Sequence[Plot]


@dataclass(frozen=True)
class Plot:
    """name: unique on the page, also the name of its file. svg: an <svg> element."""

    name: str
    title: str
    svg: str


@dataclass(frozen=True)
class Miss:
    """A wrong prediction: where, after what, how wrong, and how it differs from the truth."""

    title: str
    action: str
    scores: str
    spans: Sequence[Span]


@dataclass(frozen=True)
class Misses:
    misses: Sequence[Miss]


@dataclass(frozen=True)
class Fold:
    """Blocks that are shown on demand."""

    title: str
    blocks: Sequence[Block]


Block = Text | Table | Plots | Misses | Fold


@dataclass(frozen=True)
class Section:
    """anchor: unique on the page. level: 2 for a chapter, 3 for a part of one."""

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
